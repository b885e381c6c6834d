"""Let several linears, or linears of experts, read one norm: the norm is computed once, and each reader casts it.

    y = x / rms * gain        a reader's operand: Q(y), or Q(x / rms) and Q(W * gain) where the gain is folded

The arithmetic is that of `mxstudy.numerics.norm_linear`, which is one function for a norm and one reader. Here the norm
is a function of its own, and every reader returns the gradient of x / rms * gain + bias, folded or not. The readers'
gradients are summed in FP32, and the norm's backward runs once. With a folded gain that is the straight-through
estimator of the MXNorm paper, section 3.7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy.config.casts import Gemms
from mxstudy.numerics.dispatch import Dispatch, sum_of_copies, to_rows
from mxstudy.numerics.experts import Grouped, Loop, ThreeGemms
from mxstudy.numerics.gemms import Bounds, CastKernel, Linear, linear_of
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.norm_linear import (
    NormBounds,
    affine,
    as_read,
    center,
    norm_backward,
    normalize,
    times_gain,
    weight_and_bounds,
)


class NormOutput(NamedTuple):
    """A norm's output as its readers read it. `y_TI`: float32, x / rms, times the gain unless that is folded.

    `gain_I`, `bias_I`: the norm's, or None. `bounds`: upper bounds of |x / rms|.
    """

    y_TI: Tensor
    gain_I: Tensor
    bias_I: Tensor | None
    bounds: NormBounds
    fold_gain: bool

    def weight_and_bounds(self, weight: Tensor) -> tuple[Tensor, Bounds | None]:
        """Return a reader's weight as the forward quantises it, and upper bounds of |y|."""
        return weight_and_bounds(weight, self.gain_I, self.bias_I, self.bounds, self.fold_gain)

    @property
    def unfolded(self) -> Tensor:
        """Return x / rms * gain + bias, float32, for a reader in high precision."""
        if not self.fold_gain:
            return self.y_TI
        y_TI: Tensor = _TimesGain.apply(self.y_TI, self.gain_I)
        return y_TI


def normed(
    x_TI: Tensor,
    mean_T1: Tensor | None,
    rms_T1: Tensor,
    gain_I: Tensor,
    bias_I: Tensor | None,
    bounds: NormBounds,
    fold_gain: bool,
) -> NormOutput:
    """Return the norm of x [T, in] for several readers; no gradient flows through `rms_T1` and `mean_T1` themselves."""
    y_TI = _Norm.apply(x_TI, mean_T1, rms_T1, gain_I, bias_I, fold_gain)
    return NormOutput(y_TI, gain_I.detach(), None if bias_I is None else bias_I.detach(), bounds, fold_gain)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        mean_T1: Tensor | None,
        rms_T1: Tensor,
        gain_I: Tensor,
        bias_I: Tensor | None,
        fold_gain: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_TI, mean_T1, rms_T1, gain_I, bias_I)
        return as_read(normalize(center(x_TI, mean_T1), rms_T1), gain_I, bias_I, fold_gain)

    @staticmethod
    def backward(ctx: Any, dy_TI: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, mean_T1, rms_T1, gain_I, bias_I = ctx.saved_tensors
        xbar_TI = normalize(center(x_TI, mean_T1), rms_T1)
        dx, dgain, dbias = norm_backward(dy_TI, xbar_TI, rms_T1, gain_I, bias_I, centers=mean_T1 is not None)
        return to_dtype(dx, x_TI.dtype), None, None, dgain, dbias, None


class _TimesGain(torch.autograd.Function):
    """Return y * gain; the backward passes on the gradient of that product, which the norm takes."""

    @staticmethod
    def forward(ctx: Any, y_TI: Tensor, gain_I: Tensor) -> Tensor:
        return affine(y_TI, gain_I, None)

    @staticmethod
    def backward(ctx: Any, dy_TI: Tensor) -> tuple[Tensor, None]:
        return dy_TI, None


@dataclass(frozen=True)
class Reads:
    """The settings of a reader. `dtype`: that of unquantised operands and of its result.

    `kernel`: as in `Linear`. `bounds`: upper bounds of |x / rms|; None: its input is not a norm's output.
    `is_grouped`: all experts in one grouped GEMM, instead of one after the other. `dispatches`: it reads tokens, which
    it dispatches, and sums their gradient by token; otherwise it has no experts, or reads rows that are dispatched.
    """

    gemms: Gemms
    kernel: CastKernel | None
    dtype: torch.dtype
    bounds: NormBounds | None = None
    fold_gain: bool = False
    is_grouped: bool = False
    dispatches: bool = False


def read_norm(
    norm_output: NormOutput,
    weight: Tensor,
    linear: Linear,
    dtype: torch.dtype,
    dispatch: Dispatch | None = None,
    is_grouped: bool = False,
) -> Tensor:
    """Return the linear of the norm: weight [out, in] -> [T, out], or experts' [E, out, in] -> dispatched [N, out]."""
    y_TI, gain_I, bias_I, bounds, fold_gain = norm_output
    reads = Reads(linear.gemms, linear.kernel, dtype, bounds, fold_gain, is_grouped, dispatches=dispatch is not None)
    return _read(y_TI, weight, gain_I, bias_I, linear, reads, dispatch)


def read_rows(
    x_NI: Tensor,
    weight_EOI: Tensor,
    linear: Linear,
    dtype: torch.dtype,
    dispatch: Dispatch,
    is_grouped: bool,
) -> Tensor:
    """Return the output of the experts' linears for dispatched rows: [N, out]."""
    reads = Reads(linear.gemms, linear.kernel, dtype, is_grouped=is_grouped)
    return _read(x_NI, weight_EOI, None, None, linear, reads, dispatch)


def _read(
    x: Tensor,
    weight: Tensor,
    gain_I: Tensor | None,
    bias_I: Tensor | None,
    linear: Linear,
    reads: Reads,
    dispatch: Dispatch | None,
) -> Tensor:
    keys, places = linear.random or (None, None)
    h: Tensor = _Reader.apply(x, weight, gain_I, bias_I, keys, places, reads, *(dispatch or ()))
    return h


def gemms_of(
    reads: Reads, weight: Tensor, keys: Tensor | None, places: Tensor | None, dispatch: Dispatch | None
) -> ThreeGemms:
    """Return the three GEMMs of a reader with these settings."""
    linear = linear_of(reads.gemms, keys, places, kernel=reads.kernel)
    if dispatch is None:
        return ThreeGemms(linear)
    return (Grouped if reads.is_grouped else Loop)(linear, dispatch, weight.shape[-2])


class _Reader(torch.autograd.Function):
    """Apply a linear, or those of all experts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        gain_I: Tensor | None,
        bias_I: Tensor | None,
        keys: Tensor | None,
        places: Tensor | None,
        reads: Reads,
        *parts: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, gain_I, bias_I, keys, places, *parts)
        ctx.reads, dispatch = reads, Dispatch(*parts) if parts else None
        gemms = gemms_of(reads, weight, keys, places, dispatch)
        forward_weight, bounds = weight_and_bounds(weight, gain_I, bias_I, reads.bounds, reads.fold_gain)
        if dispatch is not None and reads.dispatches:
            return gemms.forward_tokens(x, dispatch, forward_weight, reads.dtype, bounds)
        return gemms.forward(x, forward_weight, reads.dtype, bounds)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gain_I, bias_I, keys, places, *parts = ctx.saved_tensors
        reads, dispatch = ctx.reads, Dispatch(*parts) if parts else None
        gemms, sent = gemms_of(reads, weight, keys, places, dispatch), dispatch if reads.dispatches else None
        forward_weight, bounds = weight_and_bounds(weight, gain_I, bias_I, reads.bounds, reads.fold_gain)
        rows = x if sent is None else to_rows(x, sent)
        dx = gemms.dgrad(dh, weight, rows, forward_weight, bounds)
        dweight = gemms.wgrad(dh, rows, forward_weight, bounds)
        dweight = times_gain(dweight, gain_I) if reads.fold_gain else dweight
        dx = dx if sent is None else sum_of_copies(dx, sent)
        return to_dtype(dx, x.dtype), to_dtype(dweight, weight.dtype), *(None,) * (5 + len(parts))
