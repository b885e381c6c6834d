"""Norms: what differs between them is the RMS that they divide by, and whether their gain moves into the weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mxstudy import config
from mxstudy.numerics.cast import BlockCast, Quantized
from mxstudy.numerics.norm import norm_cast, normalize, rms_coefficient, rms_estimate, rms_exact
from mxstudy.reader import ConfigError


class Norm(nn.Module):
    """x [..., size] -> x / rms(x) * gain, computed in FP32 and rounded once to x's dtype."""

    fold_gain: bool

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.empty(size))

    def rms(self, x: Tensor) -> Tensor:
        """The row's RMS, or an estimate of it: float32, [..., 1]."""
        raise NotImplementedError

    @property
    def bound(self) -> float:
        """What no element of x / rms(x) exceeds in magnitude (MXNorm paper, Lemmas 1 and 2)."""
        raise NotImplementedError

    def cast(self, x: Tensor, fmt: str, cast: BlockCast) -> Quantized:
        """x / rms(x), without the gain, as an MX tensor."""
        return norm_cast(x, self.rms(x), fmt, cast)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype).float()
        return (normalize(x, self.rms(x)) * weight).to(x.dtype)


class RMSNorm(Norm):
    """Zhang and Sennrich 2019; eps is added to the mean square."""

    def __init__(self, size: int, eps: float = 1e-5, fold_gain: bool = False) -> None:
        super().__init__(size, eps)
        self.fold_gain = fold_gain

    def rms(self, x: Tensor) -> Tensor:
        return rms_exact(x, self.eps)

    @property
    def bound(self) -> float:
        return self.size**0.5


class MXNorm(Norm):
    """RMS from the block absmax that the MX cast needs anyway (MXNorm paper, section 3.4); eps is added to the RMS."""

    fold_gain = True

    def __init__(self, size: int, p: float, block_size: int = 32, eps: float = 1e-5) -> None:
        super().__init__(size, eps)
        if size % block_size:
            raise ConfigError(f"model.hidden_size: {size} does not divide into blocks of {block_size}")
        self.p, self.block_size = p, block_size

    def rms(self, x: Tensor) -> Tensor:
        return rms_estimate(x, self.p, self.block_size, self.eps)

    @property
    def bound(self) -> float:
        return (self.size / self.block_size) ** (1 / self.p) / rms_coefficient(self.p, self.block_size)


NORMS: dict[type, Callable[[config.Norm, int, int], Norm]] = {
    config.RMSNorm: lambda norm, size, block_size: RMSNorm(size, norm.eps, norm.fold_gain),  # type: ignore[union-attr]
    config.MXNorm: lambda norm, size, block_size: MXNorm(size, norm.p, block_size, norm.eps),  # type: ignore[union-attr]
}


def build_norm(norm: config.Norm, size: int, block_size: int) -> Norm:
    return NORMS[type(norm)](norm, size, block_size)
