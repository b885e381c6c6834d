"""Measures of a cast's error: pure functions of tensors without host synchronisation, 0-dim unless elementwise."""

from __future__ import annotations

import torch
from torch import Tensor

from mxstudy.numerics.formats import FORMATS
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.quantized import Quantized
from mxstudy.numerics.tiles import Tiles


def r_squared(got: Tensor, want: Tensor) -> Tensor:
    """Return 1 - SSE / SST: the share of the variance of `want` that `got` explains."""
    got, want = got.double(), want.double()
    return 1 - (got - want).square().sum() / (want - want.mean()).square().sum()


def pearson_squared(got: Tensor, want: Tensor) -> Tensor:
    """Return the squared correlation of both: unlike `r_squared` it ignores a constant factor."""
    got, want = got.double() - got.double().mean(), want.double() - want.double().mean()
    return (got * want).sum() ** 2 / (got.square().sum() * want.square().sum())


def quantisation_gain(decoded: Tensor, x: Tensor) -> Tensor:
    """Return the slope <q, x> / <x, x> of the decoded q; above 1 the cast enlarges x."""
    decoded, x = decoded.double(), x.double()
    return (decoded * x).sum() / x.square().sum()


def sqnr_db(decoded: Tensor, x: Tensor) -> Tensor:
    """Return the signal to quantisation noise ratio in decibels."""
    decoded, x = decoded.double(), x.double()
    return 10 * torch.log10(x.square().sum() / (decoded - x).square().sum())


def overflow_fraction(quantized: Quantized, x: Tensor) -> Tensor:
    """Return the strict last bin: the fraction of elements with |x| > max * scale, which the cast clamps."""
    return overflows(quantized, x).double().mean()


def overflows(quantized: Quantized, x: Tensor) -> Tensor:
    """Return for each element of x whether |x| > max * scale: bool, x's shape. Scales of 0 clamp nothing."""
    tiles, scales = quantized.tiles, quantized.scale_values
    limit = quantized.format.max * tiles.spread(torch.where(scales == 0, torch.inf, scales))
    return tiles.join(tiles.split(x, pad=True).float().abs() > limit)


def max_fraction(quantized: Quantized) -> Tensor:
    """Return the wide last bin: the fraction of elements rounded or clamped to the format's largest number."""
    return is_max(quantized).double().mean()


def is_max(quantized: Quantized) -> Tensor:
    """Return for each element whether it became the format's largest number: bool, x's shape."""
    return (quantized.values.abs() == quantized.format.max) & ~has_no_scale(quantized)


def underflow_fraction(quantized: Quantized, x: Tensor) -> Tensor:
    """Return the fraction of elements that were not zero and became zero, by rounding or by a block scale of 0."""
    return (((quantized.values == 0) | has_no_scale(quantized)) & (x != 0)).double().mean()


def has_no_scale(quantized: Quantized) -> Tensor:
    """Return for each element whether its block's scale is 0, with which it decodes to 0: bool, the values' shape."""
    tiles = quantized.tiles
    is_zero = tiles.spread(quantized.scale_values == 0)
    return tiles.join(is_zero.expand(tiles.split(quantized.values, pad=True).shape))


def has_nonzero(x: Tensor, tiles: Tiles) -> Tensor:
    """Return for each block of x whether a number in it is not 0: bool, one per block."""
    return tiles.squeeze((tiles.split(x, pad=True) != 0).any(tiles.inner, keepdim=True))


def subnormal_scale_fraction(quantized: Quantized, x: Tensor) -> Tensor:
    """Return the fraction of blocks whose E4M3 scale is below the least normal one, 2^-6: it has fewer bits, or is 0.

    Blocks of zeros are not counted; without any other it is NaN. The inference chain raises such scales to 2^-6, so it
    has none. It is 0 for scales in other formats, which are never subnormal.
    """
    if quantized.scales.dtype != torch.float8_e4m3fn:
        return torch.zeros((), dtype=torch.float64, device=quantized.values.device)
    counts = has_nonzero(x, quantized.tiles)
    is_subnormal = to_dtype(quantized.scales, torch.float32) < 2.0 ** FORMATS["E4M3"].emin
    return (is_subnormal & counts).sum().double() / counts.sum()
