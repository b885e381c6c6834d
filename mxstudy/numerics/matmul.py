"""The three GEMMs of a linear layer, each operand quantised along its own contraction axis.

    forward   H  = Q(X; in)  . Q(W; in)^T        X [T, in], W [out, in]
    dgrad     dX = Q(dH; out) . Q(W; out)
    wgrad     dW = Q(dH; T)^T . Q(X; T)

A block scale belongs to one axis, so X, W and dH are each quantised twice, both times from high precision: what was
quantised for one GEMM is never quantised again for another. Every GEMM accumulates in FP32 and rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxstudy.numerics.cast import BlockCast, fake_quantize, to_dtype


@dataclass(frozen=True)
class Gemms:
    """The element format of each operand of the three GEMMs; None is the compute dtype."""

    forward_x: str | None = None
    forward_w: str | None = None
    dgrad_dh: str | None = None
    dgrad_w: str | None = None
    wgrad_dh: str | None = None
    wgrad_x: str | None = None


E4M3, E5M2 = "E4M3", "E5M2"

#                                    forward X  W     dgrad dH  W     wgrad dH  X
PRECISIONS = {
    "fp32": Gemms(),
    "bf16": Gemms(),
    "mxfp8": Gemms(E4M3, E4M3, E4M3, E4M3, E4M3, E4M3),
    "mxfp8_e5m2_grad": Gemms(E4M3, E4M3, E5M2, E4M3, E5M2, E4M3),  # MXNorm paper; HYBRID in Transformer Engine
    "mx_mix": Gemms(E4M3, E4M3, E5M2, E5M2, E5M2, E4M3),  # instability paper
    "mxfp8_forward_only": Gemms(E4M3, E4M3, None, None, None, None),
    "mxfp8_backward_only": Gemms(None, None, E4M3, E4M3, E4M3, E4M3),
    "mxfp8_bf16_act_fwd": Gemms(None, E4M3, E4M3, E4M3, E4M3, None),
    "mxfp8_bf16_act": Gemms(None, E4M3, None, E4M3, None, None),
    "mxfp8_bf16_weight": Gemms(E4M3, None, E4M3, None, E4M3, E4M3),
    "mxfp8_e5m2": Gemms(E5M2, E5M2, E5M2, E5M2, E5M2, E5M2),
    "mxfp8_e5m2_weight": Gemms(E4M3, E5M2, E4M3, E5M2, E4M3, E4M3),
    "mxfp8_e5m2_act": Gemms(E5M2, E4M3, E4M3, E4M3, E4M3, E5M2),
}


def operand(x: Tensor, fmt: str | None, axis: int, cast: BlockCast, dtype: torch.dtype) -> Tensor:
    """x as a GEMM reads it: quantised along `axis` and decoded, or rounded to the compute dtype.

    On CPU in float32, where bf16 GEMMs are several times slower; the values are the same.
    """
    if fmt is None:
        x = to_dtype(x, dtype)
    else:
        x = to_dtype(x, torch.float32)
        x = fake_quantize(x, fmt, cast.block_size, axis, cast.scale_rule, cast.rounding)
    return to_dtype(x, torch.float32 if x.device.type == "cpu" else dtype)


def mx_linear(x: Tensor, weight: Tensor, gemms: Gemms, cast: BlockCast) -> Tensor:
    """x [..., in] times weight [out, in] transposed, both bf16 or both fp32 -> [..., out] of the same dtype."""
    h_TO = _MXLinear.apply(x.flatten(0, -2), weight, gemms, cast)
    return h_TO.unflatten(0, x.shape[:-1])


class _MXLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, gemms: Gemms, cast: BlockCast) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.gemms, ctx.cast = gemms, cast
        return forward_gemm(x_TI, weight_OI, gemms, cast, x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, dh_TO: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_TI, weight_OI = ctx.saved_tensors
        dx_TI = dgrad_gemm(dh_TO, weight_OI, ctx.gemms, ctx.cast)
        return dx_TI, wgrad_gemm(dh_TO, x_TI, ctx.gemms, ctx.cast), None, None


def forward_gemm(x_TI: Tensor, weight_OI: Tensor, gemms: Gemms, cast: BlockCast, dtype: torch.dtype) -> Tensor:
    x = operand(x_TI, gemms.forward_x, 1, cast, dtype)
    w = operand(weight_OI, gemms.forward_w, 1, cast, dtype)
    return to_dtype(x @ w.T, dtype)


def dgrad_gemm(dh_TO: Tensor, weight_OI: Tensor, gemms: Gemms, cast: BlockCast) -> Tensor:
    dh = operand(dh_TO, gemms.dgrad_dh, 1, cast, dh_TO.dtype)
    w = operand(weight_OI, gemms.dgrad_w, 0, cast, dh_TO.dtype)
    return to_dtype(dh @ w, dh_TO.dtype)


def wgrad_gemm(dh_TO: Tensor, x_TI: Tensor, gemms: Gemms, cast: BlockCast) -> Tensor:
    dh = operand(dh_TO, gemms.wgrad_dh, 0, cast, dh_TO.dtype)
    x = operand(x_TI, gemms.wgrad_x, 0, cast, dh_TO.dtype)
    return to_dtype(dh.T @ x, dh_TO.dtype)
