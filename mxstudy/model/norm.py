"""Normalisation layers; they differ in the RMS that they divide by and in whether the gain is folded into the weight.

LayerNorm also subtracts the row's mean first, may add a bias, and may have neither gain nor bias.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mxstudy import config
from mxstudy.config.casts import Hadamard
from mxstudy.config.model import check_exponent
from mxstudy.kernels import RowNorm
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.formats import SCALE_RULES
from mxstudy.numerics.norm_linear import (
    NormBounds,
    affine,
    center,
    normalize,
    rms_coefficient,
    rms_estimate,
    rms_exact,
    row_mean,
)
from mxstudy.numerics.postround import rms_post_round, smallest_rms
from mxstudy.numerics.vector_ops import VectorCast, norm_op_by_op
from mxstudy.reader import ConfigError, require

Output = Literal["fused", "rounded", "op_by_op", "op_by_op_skipped"]


class Norm(nn.Module):
    """Map x [..., size] to x / rms(x) * gain, computed in FP32 and rounded once to x's dtype.

    `weight` is the gain, or None; `bias` is added after it, or None. `centers`: subtract x's mean first. `reads`: the
    settings of `precision` that the norm is built from. `output`: what the linear fused with the norm reads.
    `fused`: unrounded FP32, never stored as a tensor. `rounded`: a tensor in x's dtype, rounded once. `op_by_op`: a
    tensor in bf16, rounded after every operation. `op_by_op_skipped`: the same, rounded after most operations, as in
    the public code, which tries to skip these roundings. With a folded gain it is `fused`, whatever this says.
    `fold_gain_in_dgrad`: dgrad reads the folded weight too. `estimates`: the RMS is an estimate from blocks of the
    forward cast's input, which is x under `transform` if there is one. `rounding`: of gain and bias before they are
    used; None rounds them to x's dtype. `output` and `rounding` may be set anew between steps.
    """

    fold_gain: bool
    fold_gain_in_dgrad = False
    centers = False
    estimates = False
    transform: Hadamard | None = None
    output: Output = "fused"
    rounding: VectorCast | None = None
    reads: tuple[str, ...] = ()
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, size: int, eps: float, affine: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.register_parameter("weight", nn.Parameter(torch.ones(size)) if affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(size)) if bias else None)

    def rms(self, x: Tensor) -> Tensor:
        """Return the rows' RMS, or an estimate of it, float32 [..., 1]; x is already centered if the norm centers.

        For a norm that estimates, x is under `transform`.
        """
        raise NotImplementedError

    @property
    def bound(self) -> float:
        """Return an upper bound on the magnitude of every element of x / rms(x) (MXNorm paper, Lemmas 1 and 2)."""
        raise NotImplementedError

    def bounds(self, tile: int) -> NormBounds:
        """Return upper bounds of |xbar| under an orthonormal transform in tiles of `tile` features, and without it.

        Lemma 1 bounds xbar's length, which a transform keeps, so it bounds both. Lemma 2 bounds the elements from which
        the blocks' absmax were taken, here the transformed ones. Without the transform, an element is a sum of `tile`
        of these over the root of `tile`, so the bound grows by up to that root.
        """
        return NormBounds(self.bound, self.bound * (tile**0.5 if self.estimates else 1.0), tile)

    @property
    def is_op_by_op(self) -> bool:
        """Return whether the result is rounded after each of its operations, or after most of them."""
        return self.output in ("op_by_op", "op_by_op_skipped")

    def normalize(self, x: Tensor, rms: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the normalised x, before gain and bias: float32. `rms`: that of the centered x, if known."""
        centered = center(x, row_mean(x) if self.centers else None)
        return normalize(centered, (self.rms if rms is None else rms)(centered))

    def parameters_as(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gain (ones if there is none) and the bias (or None): in x's dtype, or float32 by `rounding`."""
        given = self.rounding or (lambda vector: vector.to(x.dtype))
        gain = x.new_ones(self.size) if self.weight is None else given(self.weight)
        return gain, None if self.bias is None else given(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_affine(x, *self.parameters_as(x))

    def apply_affine(self, x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
        """Return the norm's output, computed with these gain and bias instead of its own."""
        if self.is_op_by_op:
            return norm_op_by_op(x, gain, bias, self.eps, self.centers, skipped=self.output == "op_by_op_skipped")
        return affine(self.normalize(x), gain, bias).to(x.dtype)

    def reset_parameters(self) -> None:
        """Set the gain to 1 and the bias to 0."""
        for parameter, value in ((self.weight, 1.0), (self.bias, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)


class RMSNorm(Norm):
    """RMSNorm (Zhang and Sennrich 2019); eps is added to the mean square."""

    def __init__(self, size: int, eps: float = 1e-5, fold_gain: bool = False, fold_gain_in_dgrad: bool = False) -> None:
        super().__init__(size, eps)
        self.fold_gain, self.fold_gain_in_dgrad = fold_gain, fold_gain_in_dgrad

    def rms(self, x: Tensor) -> Tensor:
        return rms_exact(x, self.eps)

    @property
    def bound(self) -> float:
        return self.size**0.5


class LayerNorm(Norm):
    """LayerNorm (Ba, Kiros and Hinton 2016): RMSNorm of x minus its mean; eps is added to the variance."""

    fold_gain = False
    centers = True

    def __init__(self, size: int, eps: float = 1e-5, bias: bool = False, affine: bool = True) -> None:
        super().__init__(size, eps, affine, bias)

    def rms(self, x: Tensor) -> Tensor:
        return rms_exact(x, self.eps)

    @property
    def bound(self) -> float:
        """Return sqrt(D - 1), which is below RMSNorm's sqrt(D).

        The elements of a row sum to 0 and their squares to at most D. For an element a, the D - 1 others sum to -a, so
        their squares sum to at least a^2 / (D - 1). Hence a^2 D / (D - 1) <= D.
        """
        return (self.size - 1) ** 0.5

    def bounds(self, tile: int) -> NormBounds:
        """Return sqrt(D) under a transform, whose elements need not sum to 0, and sqrt(D - 1) without."""
        return NormBounds(self.bound if tile == 1 else self.size**0.5, self.bound, tile)


class MXNorm(Norm):
    """Estimates the RMS from the block absmax that the MX cast needs anyway (MXNorm paper, section 3.4); adds eps."""

    fold_gain = True
    estimates = True

    def __init__(
        self, size: int, p: float, block_size: int = 32, eps: float = 1e-5, fold_gain_in_dgrad: bool = False
    ) -> None:
        super().__init__(size, eps)
        check_exponent(p)
        self.p, self.fold_gain_in_dgrad = p, fold_gain_in_dgrad
        self.take_blocks(block_size, None)

    def take_blocks(self, block_size: int, transform: Hadamard | None) -> None:
        """Take the absmax of blocks of that size, of x under that transform, from now on."""
        check_blocks(self.size, block_size)
        self.block_size, self.transform = block_size, transform

    def rms(self, x: Tensor) -> Tensor:
        return rms_estimate(x, self.p, self.block_size, self.eps)

    @property
    def bound(self) -> float:
        return (self.size / self.block_size) ** (1 / self.p) / rms_coefficient(self.p, self.block_size)


class PostRoundMXNorm(Norm):
    """Estimates the RMS from the rounded block scales of the MX cast of x (MXNorm paper, appendix K); adds eps.

    x / rms is cast anew, as in MXNorm, so that the ablation changes only the estimate.
    """

    fold_gain = True
    estimates = True

    def __init__(
        self, size: int, block_size: int = 32, scale_rule: str = "rceil", fmt: str = "E4M3", eps: float = 1e-5
    ) -> None:
        super().__init__(size, eps)
        check_blocks(size, block_size)
        require(scale_rule in SCALE_RULES, f"precision.scale_rule: {scale_rule} gives a block no scale; use floor")
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
    config.RMSNorm: lambda norm, size, cast: RMSNorm(size, norm.eps, norm.fold_gain, norm.fold_gain_in_dgrad),
    config.LayerNorm: lambda norm, size, cast: LayerNorm(size, norm.eps, norm.bias, norm.affine),
    config.MXNorm: lambda norm, size, cast: MXNorm(size, norm.p, cast.block_size, norm.eps, norm.fold_gain_in_dgrad),
    config.PostRoundMXNorm: lambda norm, size, cast: PostRoundMXNorm(
        size, cast.block_size, cast.scale_rule, norm.format, norm.eps
    ),
}


# The norms that kernels compute, by exact class: a subclass is another norm.
KERNEL_NORMS: dict[type, Callable[[Any], RowNorm]] = {
    RMSNorm: lambda norm: RowNorm(eps=norm.eps),
    LayerNorm: lambda norm: RowNorm(centers=True, eps=norm.eps),
    MXNorm: lambda norm: RowNorm(norm.p, eps=norm.eps),
}
KERNEL_FIELDS = {
    "size",
    "eps",
    "fold_gain",
    "fold_gain_in_dgrad",
    "transform",
    "output",
    "p",
    "block_size",
    "reads",
    "rounding",
    "training",
}  # the fields of these norms; the kernels take all of them into account


def why_no_kernel_norm(norm: Norm, block_size: int, outputs: Collection[str] = ("fused",)) -> str | None:
    """Return why kernels with this block size and these outputs cannot compute the norm, or None if they can."""
    name = type(norm).__name__
    if type(norm) not in KERNEL_NORMS:
        return f"{name} has no kernel"
    fields = {field for field in vars(norm) if not field.startswith("_")} - KERNEL_FIELDS
    if fields:
        return f"{name} has {', '.join(sorted(fields))}, which its kernel does not know"
    if norm.output not in outputs:
        return f"the norm's output is {norm.output}, which is stored as a tensor"
    if norm.fold_gain_in_dgrad:
        return "its dgrad takes the gain too (norm.fold_gain_in_dgrad), and kernels take W alone"
    if norm.transform is not None:
        return f"{name} takes the absmax of blocks under the forward's transform, but its kernel of the input's"
    own = getattr(norm, "block_size", block_size)
    return None if own == block_size else f"{name} takes the absmax of blocks of {own}, but its kernel of {block_size}"


def kernel_norm(norm: Norm) -> RowNorm:
    """Return the norm's settings in the form that kernels take."""
    return KERNEL_NORMS[type(norm)](norm)


def build_norm(norm: config.Norm, size: int, cast: BlockCast) -> Norm:
    """Return the norm built from its config; `cast`: that of the linear which reads it.

    Raises ConfigError for a norm without a row in NORMS.
    """
    name = type(norm).__name__
    require(type(norm) in NORMS, f"norm.kind: {name} has no row in NORMS (mxstudy/model/norm.py); add one")
    built = NORMS[type(norm)](norm, size, cast)
    built.reads = norm.reads
    return built


def build_exact_norm(norm: config.Norm, size: int) -> Norm:
    """Return a norm that is fused with no linear: LayerNorm if the blocks have it, else RMSNorm."""
    if isinstance(norm, config.LayerNorm):
        return LayerNorm(size, norm.eps, norm.bias, norm.affine)
    return RMSNorm(size, norm.eps)
