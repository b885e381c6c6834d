"""The exact last-bin fractions of a cast of Gaussian numbers; `quality` counts them in a given tensor."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from scipy import special

from mxstudy.numerics.formats import look_up_mx
from mxstudy.numerics.scales import absmax_bits, decode_scales, scale_codes

POINTS, LARGEST = 2**20, 12.0  # points of the quadrature, and its largest absmax in standard deviations


class GaussianLastBin(NamedTuple):
    """Fractions of elements: `overflow`, those above max * scale; `max`, those rounded or clamped to max."""

    overflow: float
    max: float


@functools.cache
def gaussian_last_bin(fmt: str, block_size: int = 32, scale_rule: str = "rceil", std: float = 1.0) -> GaussianLastBin:
    """Return the last bin of N(0, std^2) in blocks with E8M0 scales, by quadrature over the density of absmax a.

    Given a, the block's other elements are independent and half-normal up to a. Their cdf gives the share above the
    limit, which follows from the scale of a. The error is below 1e-6. The result depends on std only within a factor of
    2, because scales are powers of two. Raises ConfigError for a format without E8M0 scales.
    """
    element = look_up_mx(fmt)
    step = LARGEST / POINTS
    absmax = (np.arange(POINTS) + 0.5) * step
    cdf = special.erf(absmax / np.sqrt(2))
    density = block_size * np.sqrt(2 / np.pi) * np.exp(-(absmax**2) / 2) * cdf ** (block_size - 1)
    bits = absmax_bits(torch.from_numpy(absmax * std).float().unsqueeze(1), 1).squeeze(1)
    scales = decode_scales(scale_codes(bits, element, scale_rule)).double().numpy() / std

    def fraction_above(limit: float) -> float:
        others = (block_size - 1) * (cdf - special.erf(limit * scales / np.sqrt(2))) / cdf
        return float((density * np.where(absmax > limit * scales, 1 + others, 0.0)).sum() * step / block_size)

    half_spacing = 2.0 ** (element.emax - element.mantissa_bits - 1)
    return GaussianLastBin(fraction_above(element.max), fraction_above(element.max - half_spacing))
