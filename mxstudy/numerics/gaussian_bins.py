"""The last bin of a cast when what is cast is Gaussian: exact, where `quality` counts in a tensor."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from scipy import special

from mxstudy.numerics.formats import look_up_mx
from mxstudy.numerics.scales import absmax_bits, decode_scales, scale_codes

POINTS, LARGEST = 2**20, 12.0  # of the quadrature, over absmax in units of the standard deviation


class GaussianLastBin(NamedTuple):
    """Fractions of all elements: beyond max times the scale, and rounded or clamped to max."""

    overflow: float
    max: float


@functools.cache
def gaussian_last_bin(fmt: str, block_size: int = 32, scale_rule: str = "rceil", std: float = 1.0) -> GaussianLastBin:
    """Of N(0, std^2), in blocks with E8M0 scales, by quadrature over the density of a block's absmax a.

    Of the block's other elements, which are independent and half-normal up to a, so many are above the limit that
    follows from the scale of a. Good to 1e-6. It depends on std within a factor of 2: scales are powers of two.
    Raises ConfigError for a format without E8M0 scales.
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
