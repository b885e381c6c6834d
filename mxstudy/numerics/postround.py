"""Estimate the RMS from rounded block scales: the ablation of MXNorm (MXNorm paper, appendix K).

A rounded absmax is r(m) = 2^j where cutoff * 2^j <= m < cutoff * 2^(j+1). For Gaussian rows of standard deviation s its
mean is f(s) = sum_j 2^j (F(cutoff * 2^(j+1) / s)^B - F(cutoff * 2^j / s)^B), F(t) = P(|Z| < t), and the RMS is f^-1 of
the observed mean. As f(2s) = 2 f(s), a table of f^-1 over [1, 2] is enough; its error is below 3e-5.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from mxstudy.compat.torch_compiler import constant
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.formats import SCALE_RULES, ElementFormat, look_up, look_up_mx
from mxstudy.numerics.grid import EXPONENT_MASK, MANTISSA_BITS, MANTISSA_MASK, to_dtype
from mxstudy.numerics.scales import absmax_bits, decode_scales, scale_codes
from mxstudy.numerics.tiles import split_blocks

TABLE_BITS = 8  # upper mantissa bits that index the table: 256 intervals


def cutoff(fmt: ElementFormat, scale_rule: str) -> float:
    """Return the fraction of a power of two from which absmax rounds up to it.

    floor 1, ceil 1/2; for E4M3 rceil 7/8 and even 31/32.
    """
    return 1 - look_up(SCALE_RULES, scale_rule, "scale_rule")(fmt) / 2**24


def mean_rounded_absmax(std: Tensor, block_size: int, cutoff: float) -> Tensor:
    """Return the mean rounded block absmax of N(0, std^2): float64, std's shape."""
    powers = 2.0 ** torch.arange(-40, 41, dtype=torch.float64, device=std.device)
    below = torch.erf(cutoff * powers / (std.double().unsqueeze(-1) * 2**0.5)) ** block_size
    return (powers[:-1] * below.diff(dim=-1)).sum(-1)


@constant
def inverse_table(block_size: int, cutoff: float, device: torch.device) -> Tensor:
    """Return the std for mean rounded absmax 1, 1 + 1/256, ..., 2: float32 [257]."""
    return _inverse_table(block_size, cutoff, device)


@functools.cache
def _inverse_table(block_size: int, cutoff: float, device: torch.device) -> Tensor:
    stds = np.linspace(0.1, 4.0, 2**16)
    means = mean_rounded_absmax(torch.from_numpy(stds), block_size, cutoff)
    table = np.interp(np.linspace(1, 2, 2**TABLE_BITS + 1), means, stds)
    return torch.tensor(table, dtype=torch.float32, device=device)


def rms_post_round(x: Tensor, fmt: str, cast: BlockCast, eps: float) -> Tensor:
    """Return the RMS estimated from each row's rounded block absmax, plus eps: float32 [..., 1].

    Scales are taken relative to the row's largest, so that every exponent stays in range.
    """
    element = look_up_mx(fmt)
    blocks = split_blocks(to_dtype(x, torch.float32), cast.block_size, x.ndim - 1)
    codes = scale_codes(absmax_bits(blocks, x.ndim).squeeze(-1), element, cast.scale_rule)
    largest = codes.amax(-1, keepdim=True)
    mean = decode_scales((codes - largest + 127).clamp_min(0)).mean(-1, keepdim=True)
    std = interpolate(mean, inverse_table(cast.block_size, cutoff(element, cast.scale_rule), x.device))
    rms = std * decode_scales(largest) * 2.0**element.emax
    return rms + eps


def interpolate(mean: Tensor, table: Tensor) -> Tensor:
    """Return f^-1(mean), linear between entries: the mantissa of `mean` gives index and fraction, its exponent 2^k."""
    bits = mean.view(torch.int32)
    position = (bits & MANTISSA_MASK).to(torch.float32) * 2.0 ** (TABLE_BITS - MANTISSA_BITS)
    index = position.to(torch.int64)
    low, high = table[index], table[index + 1]
    power = (bits & EXPONENT_MASK).view(torch.float32)
    return (low + (high - low) * (position - index)) * power


def smallest_rms(num_blocks: int, fmt: str, cast: BlockCast) -> float:
    """Return a lower bound of the estimate, without eps, for a row whose largest magnitude is 1.

    The largest block's rounded absmax is above 1 / (2 cutoff); the others' may be zero.
    """
    limit = cutoff(look_up_mx(fmt), cast.scale_rule)
    table = inverse_table(cast.block_size, limit, torch.device("cpu"))
    share = min(table.numpy() / np.linspace(1, 2, len(table)))  # the smallest f^-1(m) / m over one octave
    return float(share) / (2 * limit * num_blocks)
