"""Norms: what differs between them is the RMS that they divide by, and whether their gain moves into the weight.

LayerNorm subtracts the row's mean first, may add a bias, and may have neither gain nor bias.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mxstudy import config
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.formats import SCALE_RULES
from mxstudy.numerics.kernels import RowNorm
from mxstudy.numerics.norm import affine, center, normalize, rms_coefficient, rms_estimate, rms_exact, row_mean
from mxstudy.numerics.postround import rms_post_round, smallest_rms
from mxstudy.numerics.vector import norm_op_by_op
from mxstudy.reader import ConfigError, require

Output = Literal["joined", "rounded", "op_by_op", "op_by_op_skipped"]


class Norm(nn.Module):
    """x [..., size] -> x / rms(x) * gain, computed in FP32 and rounded once to x's dtype.

    `weight` is the gain, None where there is none, and `bias` what is added after it; `centers`: x is less its mean.
    `reads`: the settings of the run that it is built with, beside its size.
    `output`: what a linear reads, that is joined to it: unrounded FP32, of no tensor of its own; or a tensor in x's
    dtype, rounded once; or one in bf16 whose every operation was rounded, or most of them, in the public code's attempt
    to skip that. A folded gain leaves no choice.
    """

    fold_gain: bool
    centers = False
    output: Output = "joined"
    reads: tuple[str, ...] = ()
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, size: int, eps: float, affine: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.register_parameter("weight", nn.Parameter(torch.empty(size)) if affine else None)
        self.register_parameter("bias", nn.Parameter(torch.empty(size)) if bias else None)

    def rms(self, x: Tensor) -> Tensor:
        """The RMS of the rows of x, centered already if the norm centers, or an estimate of it: float32, [..., 1]."""
        raise NotImplementedError

    @property
    def bound(self) -> float:
        """What no element of `normalize(x)` exceeds in magnitude (MXNorm paper, Lemmas 1 and 2)."""
        raise NotImplementedError

    @property
    def is_op_by_op(self) -> bool:
        """Whether its operations are rounded one by one, all or most of them."""
        return self.output in ("op_by_op", "op_by_op_skipped")

    def normalize(self, x: Tensor) -> Tensor:
        """x before gain and bias: float32."""
        centered = center(x, row_mean(x) if self.centers else None)
        return normalize(centered, self.rms(centered))

    def parameters_as(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gain (ones where there is none) and bias in x's dtype."""
        gain = x.new_ones(self.size) if self.weight is None else self.weight.to(x.dtype)
        return gain, None if self.bias is None else self.bias.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_affine(x, *self.parameters_as(x))

    def apply_affine(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        """The norm's output with that gain and bias in place of its own."""
        if self.is_op_by_op:
            return norm_op_by_op(x, gain, bias, self.eps, self.centers, skipped=self.output == "op_by_op_skipped")
        return affine(self.normalize(x), gain, bias).to(x.dtype)

    def reset_parameters(self) -> None:
        """Gain 1, bias 0."""
        for parameter, value in ((self.weight, 1.0), (self.bias, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)


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


class LayerNorm(Norm):
    """Ba, Kiros and Hinton 2016: RMSNorm of x less its mean; eps is added to the variance."""

    fold_gain = False
    centers = True

    def __init__(self, size: int, eps: float = 1e-5, bias: bool = False, affine: bool = True) -> None:
        super().__init__(size, eps, affine, bias)

    def rms(self, x: Tensor) -> Tensor:
        return rms_exact(x, self.eps)

    @property
    def bound(self) -> float:
        """sqrt(D - 1), below RMSNorm's sqrt(D).

        A row adds up to 0 and its squares to D at most. Beside an element a the D - 1 others add up to -a, and so their
        squares to a^2 / (D - 1) at least: a^2 D / (D - 1) <= D.
        """
        return (self.size - 1) ** 0.5


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
        require(scale_rule in SCALE_RULES, f"precision.scale_rule: {scale_rule} gives a block no scale; take floor")
        self.fmt, self.block_cast = fmt, BlockCast(block_size, scale_rule)
        self._bound = 1 / smallest_rms(size // block_size, fmt, self.block_cast)

    def rms(self, x: Tensor) -> Tensor:
        return rms_post_round(x, self.fmt, self.block_cast, self.eps)

    @property
    def bound(self) -> float:
        return self._bound


def check_blocks(size: int, block_size: int) -> None:
    if block_size < 1 or size % block_size:
        raise ConfigError(f"model.hidden_size: {size} does not divide into blocks of {block_size}")


NORMS: dict[type, Callable[[Any, int, BlockCast], Norm]] = {
    config.RMSNorm: lambda norm, size, cast: RMSNorm(size, norm.eps, norm.fold_gain),
    config.LayerNorm: lambda norm, size, cast: LayerNorm(size, norm.eps, norm.bias, norm.affine),
    config.MXNorm: lambda norm, size, cast: MXNorm(size, norm.p, cast.block_size, norm.eps),
    config.PostRoundMXNorm: lambda norm, size, cast: PostRoundMXNorm(
        size, cast.block_size, cast.scale_rule, norm.format, norm.eps
    ),
}


# The norms that kernels compute, by their very class: one that inherits from it is another norm.
KERNEL_NORMS: dict[type, Callable[[Any], RowNorm]] = {
    RMSNorm: lambda norm: RowNorm(eps=norm.eps),
    LayerNorm: lambda norm: RowNorm(centers=True, eps=norm.eps),
    MXNorm: lambda norm: RowNorm(norm.p, eps=norm.eps),
}
KNOWN = {
    "size",
    "eps",
    "fold_gain",
    "output",
    "p",
    "block_size",
    "reads",
    "training",
}  # what those have, and kernels respect


def why_no_kernel_norm(norm: Norm, block_size: int, outputs: Collection[str] = ("joined",)) -> str | None:
    """Return why kernels, with blocks of that size and these outputs, do not compute that norm; None if they do."""
    name = type(norm).__name__
    if type(norm) not in KERNEL_NORMS:
        return f"{name} has no kernel"
    fields = {field for field in vars(norm) if not field.startswith("_")} - KNOWN
    if fields:
        return f"{name} has {', '.join(sorted(fields))}, which its kernel does not know"
    if norm.output not in outputs:
        return f"the norm's output is {norm.output}, a tensor of its own"
    own = getattr(norm, "block_size", block_size)
    return None if own == block_size else f"{name} takes maxima of blocks of {own}, and its kernel of {block_size}"


def kernel_norm(norm: Norm) -> RowNorm:
    """Return the norm as kernels take it."""
    return KERNEL_NORMS[type(norm)](norm)


def build_norm(norm: config.Norm, size: int, cast: BlockCast) -> Norm:
    """`cast`: that of the linear which reads the norm. ConfigError for a norm without a row in NORMS."""
    name = type(norm).__name__
    require(type(norm) in NORMS, f"norm.kind: {name} has no row in NORMS (mxstudy/model/norm.py); add one")
    built = NORMS[type(norm)](norm, size, cast)
    built.reads = norm.reads
    return built


def build_exact_norm(norm: config.Norm, size: int) -> Norm:
    """A norm that no linear is joined to: LayerNorm where the blocks have it, else RMSNorm, whatever they estimate."""
    if isinstance(norm, config.LayerNorm):
        return LayerNorm(size, norm.eps, norm.bias, norm.affine)
    return RMSNorm(size, norm.eps)
