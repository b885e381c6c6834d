"""Norms: what differs between them is the RMS that they divide by, and whether their gain moves into the weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mxstudy import config
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.norm import normalize, rms_coefficient, rms_estimate, rms_exact
from mxstudy.numerics.postround import rms_post_round, smallest_rms
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
        check_blocks(size, block_size)
        self.p, self.block_size = p, block_size

    def rms(self, x: Tensor) -> Tensor:
        return rms_estimate(x, self.p, self.block_size, self.eps)

    @property
    def bound(self) -> float:
        return (self.size / self.block_size) ** (1 / self.p) / rms_coefficient(self.p, self.block_size)


class PostRoundMXNorm(Norm):
    """RMS from the scales of the MX cast of x, after their rounding (MXNorm paper, appendix K); eps is added to it.

    x / rms is cast anew, as in MXNorm: the ablation is of the estimate alone.
    """

    fold_gain = True

    def __init__(
        self, size: int, block_size: int = 32, scale_rule: str = "rceil", fmt: str = "E4M3", eps: float = 1e-5
    ) -> None:
        super().__init__(size, eps)
        check_blocks(size, block_size)
        self.fmt, self.block_cast = fmt, BlockCast(block_size, scale_rule)
        self._bound = 1 / smallest_rms(size // block_size, fmt, self.block_cast)

    def rms(self, x: Tensor) -> Tensor:
        return rms_post_round(x, self.fmt, self.block_cast, self.eps)

    @property
    def bound(self) -> float:
        return self._bound


def check_blocks(size: int, block_size: int) -> None:
    if size % block_size:
        raise ConfigError(f"model.hidden_size: {size} does not divide into blocks of {block_size}")


NORMS: dict[type, Callable[[Any, int, BlockCast], Norm]] = {
    config.RMSNorm: lambda norm, size, cast: RMSNorm(size, norm.eps, norm.fold_gain),
    config.MXNorm: lambda norm, size, cast: MXNorm(size, norm.p, cast.block_size, norm.eps),
    config.PostRoundMXNorm: lambda norm, size, cast: PostRoundMXNorm(
        size, cast.block_size, cast.scale_rule, norm.format, norm.eps
    ),
}


def build_norm(norm: config.Norm, size: int, cast: BlockCast) -> Norm:
    """`cast`: that of the linear which reads the norm."""
    return NORMS[type(norm)](norm, size, cast)
