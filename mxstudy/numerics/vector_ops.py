"""Vector operations in low precision: rounded or quantised gains; a norm and activations with every step in bf16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mxstudy.config.casts import Cast
from mxstudy.numerics.formats import is_random
from mxstudy.numerics.gemms import quantized_operand
from mxstudy.numerics.grid import round_to_bf16, round_to_bf16_away, to_dtype
from mxstudy.reader import require

Gain = Literal["fp32", "bf16", "mx"]


def round_gain(gain: Tensor, precision: Gain, cast: Cast | None, away: bool = False) -> Tensor:
    """Return gain [..., in] as the norm multiplies by it, float32; its gradient passes unrounded (straight-through).

    bf16: round with ties to even, or `away` from zero. mx: quantise in blocks along the features with this cast of an
    operand, as in the text of the instability paper (section 5.1). Raises ConfigError for mx with a cast that a gain
    cannot take (`along_vector`).
    """
    return gain if precision == "fp32" else _RoundedGain.apply(gain, precision, cast, away)


@dataclass(frozen=True)
class VectorCast:
    """How a norm's gain and bias are rounded: `round_gain`'s arguments."""

    precision: Gain
    cast: Cast | None = None
    away: bool = False

    def __call__(self, vector: Tensor) -> Tensor:
        return round_gain(vector, self.precision, self.cast, self.away)


def along_vector(cast: Cast | None) -> Cast:
    """Return a matrix's cast adapted to a vector. Raises ConfigError for a cast that a gain cannot take."""
    require(
        cast is not None,
        "gain: mx takes its format from the linear's forward, which quantises nothing; take fp32 or bf16",
    )
    assert cast is not None
    require(cast.scale != "none", "gain: mx needs blocks, and the forward has one scale a tensor; take fp32 or bf16")
    require(
        cast.statistic == "absmax",
        f"gain: mx would take its scales from the {cast.statistic} of blocks, as the forward does, and equal gains "
        "have none: they would round to almost 0; take fp32 or bf16, or statistic=absmax in the forward",
    )
    require(not is_random(cast), "gain: mx would be rounded at random with the forward; take fp32 or bf16")
    outer = cast.outer_scale if cast.outer_scale == "none" else "tensor"
    return replace(cast, two_dimensional=False, outer_scale=outer, mask_clipped=False)


class _RoundedGain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gain: Tensor, precision: Gain, cast: Cast | None, away: bool) -> Tensor:
        if precision == "mx":
            return quantized_operand(gain, along_vector(cast), -1).dequantize()
        return round_to_bf16_away(gain) if away else round_to_bf16(gain)

    @staticmethod
    def backward(ctx: Any, dgain: Tensor) -> tuple[Tensor, None, None, None]:
        return dgain, None, None, None


def norm_op_by_op(
    x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centers: bool, skipped: bool = False
) -> Tensor:
    """Return LayerNorm, or RMSNorm if it does not center, of x [..., in] in bf16, each operation rounded to bf16.

    The backward rounds each operation too. gain and bias broadcast over x. Sums accumulate in FP32. Ties go to even;
    microxcaling, which computes norms in this way, rounds them away from zero. A compiled norm needs Inductor's
    `emulate_precision_casts`, without which the roundings between fused operations vanish.

    `skipped`: compute what the instability paper's public code computes with dont_quantize_layernorm, which is meant
    to skip all rounding. Then x, bias, mean, variance and the backward are FP32. But eps is added, the root taken, and
    x normalised, scaled and shifted in bf16 as before, because that code does not pass the option on.
    """
    return _NormOpByOp.apply(x, gain, bias, eps, centers, torch.float32 if skipped else torch.bfloat16)


def mean_op_by_op(x: Tensor) -> Tensor:
    """Return the mean over the last axis, kept as 1; sum and quotient are each rounded to x's dtype."""
    return x.sum(-1, keepdim=True) / x.shape[-1]


class _NormOpByOp(torch.autograd.Function):
    """`norm_op_by_op` as an autograd function. torch rounds every result to bf16, except in tensors of dtype `low`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, bias: Tensor | None, eps: float, centers: bool, low: torch.dtype
    ) -> Tensor:
        shift = to_dtype(x, low)
        shift = shift - mean_op_by_op(shift) if centers else shift
        variance = to_dtype(mean_op_by_op(shift * shift) + eps, torch.bfloat16)
        xbar = to_dtype(shift * (1 / variance.sqrt()), torch.bfloat16)
        ctx.save_for_backward(xbar, variance, gain, bias)
        ctx.centers, ctx.low, ctx.x_dtype = centers, low, x.dtype
        y = to_dtype(xbar * gain, torch.bfloat16)
        return y if bias is None else to_dtype(y + to_dtype(bias, low), torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        xbar, variance, gain, bias = ctx.saved_tensors
        dy, xbar, inverse = to_dtype(dy, ctx.low), to_dtype(xbar, ctx.low), 1 / to_dtype(variance, ctx.low).sqrt()
        dxbar = to_dtype(dy * gain, ctx.low)
        dx = dxbar * inverse - xbar * (mean_op_by_op(dxbar * xbar) * inverse)
        dx = dx - mean_op_by_op(dx) if ctx.centers else dx
        dgain = (dy * xbar).sum_to_size(gain.shape)
        dbias = None if bias is None else to_dtype(dy.sum_to_size(bias.shape), bias.dtype)
        return to_dtype(dx, ctx.x_dtype), to_dtype(dgain, gain.dtype), dbias, None, None, None


def gelu_op_by_op(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.59375 (x + 0.044677734375 x^3)), GELU's tanh form, in bf16, each operation rounded to bf16.

    Constants and order of operations, also of the backward, are microxcaling's. Ties go to even; there, away from zero.
    """
    return _GeluOpByOp.apply(x)


def silu_op_by_op(x: Tensor) -> Tensor:
    """Return x * sigmoid(x) in bf16, each operation rounded to bf16, like `gelu_op_by_op`."""
    return _SiluOpByOp.apply(x)


def sigmoid_op_by_op(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), each operation rounded to x's dtype."""
    return 1 / (1 + torch.exp(-x))


class _GeluOpByOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        low = to_dtype(x, torch.bfloat16)
        phi = sigmoid_op_by_op((low * low * low * 0.044677734375 + low) * 1.59375)
        ctx.save_for_backward(low, phi)
        ctx.x_dtype = x.dtype
        return low * phi

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x, phi = ctx.saved_tensors
        dphi = (x * x * 0.2138671875 + 1.59375) * (phi * (1 - phi))
        return to_dtype((phi + x * dphi) * to_dtype(dy, torch.bfloat16), ctx.x_dtype)


class _SiluOpByOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        low = to_dtype(x, torch.bfloat16)
        phi = sigmoid_op_by_op(low)
        y = low * phi
        ctx.save_for_backward(y, phi)
        ctx.x_dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        y, phi = ctx.saved_tensors
        return to_dtype((phi + y * (1 - phi)) * to_dtype(dy, torch.bfloat16), ctx.x_dtype)
