"""How good a cast is: pure functions of tensors, no host synchronisation; 0-dim results but for elementwise ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mxstudy.numerics.quantized import Quantized
from mxstudy.numerics.tiles import Tiles


def r_squared(got: Tensor, want: Tensor) -> Tensor:
    """1 - SSE / SST: the share of the variance of `want` that `got` explains."""
    got, want = got.double(), want.double()
    return 1 - (got - want).square().sum() / (want - want.mean()).square().sum()


def pearson_squared(got: Tensor, want: Tensor) -> Tensor:
    """The square of their correlation: blind to a constant factor, which `r_squared` is not."""
    got, want = got.double() - got.double().mean(), want.double() - want.double().mean()
    return (got * want).sum() ** 2 / (got.square().sum() * want.square().sum())


def quantisation_gain(decoded: Tensor, x: Tensor) -> Tensor:
    """Slope <q, x> / <x, x> of the decoded q: above 1 a cast enlarges what goes through it."""
    decoded, x = decoded.double(), x.double()
    return (decoded * x).sum() / x.square().sum()


def sqnr_db(decoded: Tensor, x: Tensor) -> Tensor:
    """Signal to quantisation noise, decibels."""
    decoded, x = decoded.double(), x.double()
    return 10 * torch.log10(x.square().sum() / (decoded - x).square().sum())


def overflow_fraction(quantized: Quantized, x: Tensor) -> Tensor:
    """The last bin, strictly: of all elements those with |x| > max * scale, which the cast clamps."""
    return overflows(quantized, x).double().mean()


def overflows(quantized: Quantized, x: Tensor) -> Tensor:
    """Of each element of x whether it is beyond max * scale: bool, x's shape."""
    tiles = Tiles(x.shape, quantized.axis, quantized.block_size, quantized.two_dimensional)
    limit = quantized.format.max * tiles.spread(quantized.scale_values)
    return tiles.join(tiles.split(x, pad=True).float().abs() > limit)


def max_fraction(quantized: Quantized) -> Tensor:
    """The last bin, widely: of all elements those that became the format's largest number, clamped or rounded."""
    return is_max(quantized).double().mean()


def is_max(quantized: Quantized) -> Tensor:
    """Of each element whether it became the format's largest number: bool, x's shape."""
    return quantized.values.abs() == quantized.format.max


def underflow_fraction(quantized: Quantized, x: Tensor) -> Tensor:
    """Of all elements those that were not zero and are."""
    return ((quantized.values == 0) & (x != 0)).double().mean()
