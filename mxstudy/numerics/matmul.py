"""The three GEMMs of a linear layer, each operand quantised along its own contraction axis.

    forward   H  = Q(X; in)  . Q(W; in)^T        X [T, in], W [out, in]
    dgrad     dX = Q(dH; out) . Q(W; out)
    wgrad     dW = Q(dH; T)^T . Q(X; T)

A block scale belongs to one axis, so X, W and dH are each quantised twice, both times from high precision: what was
quantised for one GEMM is never quantised again for another. Every GEMM accumulates in FP32 and rounds once; a scale
that a whole row or tensor shares is multiplied into the accumulator.

A stack of replicas has a leading dimension, X [S, T, in] and W [S, out, in]: S layers side by side that share nothing,
no scale either. In what follows a tensor named _TI or _OI may have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.formats import FORMATS, ElementFormat, look_up
from mxstudy.numerics.grid import round_to_grid, to_dtype
from mxstudy.numerics.native import mx_tensor
from mxstudy.numerics.scales import absmax_bits, fill_scale, nvfp4_tensor_scale


@dataclass(frozen=True)
class Gemms:
    """The element format of each operand of the three GEMMs; None is the compute dtype.

    `scaling`: a scale a block, or one FP32 scale a tensor. `native`: quantised operands go to the hardware's MX GEMM.
    """

    forward_x: str | None = None
    forward_w: str | None = None
    dgrad_dh: str | None = None
    dgrad_w: str | None = None
    wgrad_dh: str | None = None
    wgrad_x: str | None = None
    scaling: Literal["block", "tensor"] = "block"
    native: bool = False

    @property
    def operands(self) -> tuple[tuple[str | None, str | None], ...]:
        """Both formats of forward, dgrad and wgrad."""
        return (
            (self.forward_x, self.forward_w),
            (self.dgrad_dh, self.dgrad_w),
            (self.wgrad_dh, self.wgrad_x),
        )


E4M3, E5M2, E3M2, E2M3, E2M1, NVFP4 = FORMATS

#                                    forward X  W     dgrad dH  W     wgrad dH  X
PRECISIONS = {
    "fp32": Gemms(),
    "bf16": Gemms(),
    "mxfp8": Gemms(E4M3, E4M3, E4M3, E4M3, E4M3, E4M3),
    "mxfp8_e5m2_grad": Gemms(E4M3, E4M3, E5M2, E4M3, E5M2, E4M3),  # MXNorm paper; HYBRID in Transformer Engine
    "mx_mix": Gemms(E4M3, E4M3, E5M2, E5M2, E5M2, E4M3),  # instability paper
    "mxfp8_forward_only": Gemms(E4M3, E4M3, None, None, None, None),
    "mxfp8_e5m2_forward_only": Gemms(E5M2, E5M2, None, None, None, None),
    "mxfp8_backward_only": Gemms(None, None, E4M3, E4M3, E4M3, E4M3),
    "mxfp8_bf16_act_fwd": Gemms(None, E4M3, E4M3, E4M3, E4M3, None),
    "mxfp8_bf16_act": Gemms(None, E4M3, None, E4M3, None, None),
    "mxfp8_e5m2_bf16_act": Gemms(None, E5M2, None, E5M2, None, None),
    "mxfp6_e2m3_bf16_act": Gemms(None, E2M3, None, E2M3, None, None),
    "mxfp8_bf16_weight": Gemms(E4M3, None, E4M3, None, E4M3, E4M3),
    "mxfp8_bf16_weight_fwd": Gemms(E4M3, None, E4M3, E4M3, E4M3, E4M3),
    "mxfp8_act_only": Gemms(E4M3, None, None, None, None, E4M3),  # its mirror image is mxfp8_bf16_act: weights only
    "mxfp8_e5m2": Gemms(E5M2, E5M2, E5M2, E5M2, E5M2, E5M2),
    "mxfp8_e5m2_weight": Gemms(E4M3, E5M2, E4M3, E5M2, E4M3, E4M3),
    "mxfp8_e5m2_act": Gemms(E5M2, E4M3, E4M3, E4M3, E4M3, E5M2),
    "mxfp8_e5m2_act_grad": Gemms(E5M2, E4M3, E5M2, E4M3, E5M2, E5M2),  # instability paper: E4M3 weights alone
    "mxfp6_e2m3": Gemms(E2M3, E2M3, E2M3, E2M3, E2M3, E2M3),
    "mxfp6_e3m2": Gemms(E3M2, E3M2, E3M2, E3M2, E3M2, E3M2),
    "mxfp4": Gemms(E2M1, E2M1, E2M1, E2M1, E2M1, E2M1),
    "fp8_tensor": Gemms(E4M3, E4M3, E5M2, E4M3, E5M2, E4M3, scaling="tensor"),  # MXFP8 recipe's baseline
    "nvfp4_forward_only": Gemms(NVFP4, NVFP4),
}


@dataclass(frozen=True)
class Operand:
    """What a GEMM multiplies, and the float32 scale that its accumulator is multiplied with; None is 1."""

    values: Tensor
    scale: Tensor | None = None

    @property
    def T(self) -> Operand:
        return Operand(transposed(self.values), None if self.scale is None else transposed(self.scale))

    def dequantize(self) -> Tensor:
        """float32."""
        values = to_dtype(self.values, torch.float32)
        return values if self.scale is None else values * self.scale


def transposed(x: Tensor) -> Tensor:
    """The last two axes; of what is no stack with `t`, which also takes a 0-dim scale and torchao's MXTensor."""
    return x.mT if x.ndim > 2 else x.t()


def operand(
    x: Tensor,
    fmt: str | None,
    axis: int,
    gemms: Gemms,
    cast: BlockCast,
    dtype: torch.dtype,
    tensor_scale: Tensor | None = None,
) -> Operand:
    """x [rows, columns] as a GEMM reads it: quantised along `axis`, -2 or -1, and decoded, or rounded to `dtype`.

    On CPU in float32, where bf16 GEMMs are several times slower; the values are the same.
    """
    gemm_dtype = torch.float32 if x.device.type == "cpu" else dtype
    if fmt is None:
        return Operand(to_dtype(to_dtype(x, dtype), gemm_dtype))
    x = to_dtype(x, torch.float32)
    if gemms.scaling == "tensor":
        values, scale = tensor_cast(x, look_up(FORMATS, fmt, "format"), cast)
        return Operand(to_dtype(values, gemm_dtype), scale)
    if tensor_scale is None:
        tensor_scale = replica_scale(x, fmt, cast)
    quantized = block_cast(x, fmt, axis, cast, tensor_scale)
    if gemms.native:
        return Operand(mx_tensor(quantized, gemm_dtype))
    if quantized.tensor_scale is None:
        return Operand(quantized.dequantize(gemm_dtype))
    return Operand(quantized.without_tensor_scale().dequantize(gemm_dtype), quantized.tensor_scale)


def tensor_cast(x: Tensor, fmt: ElementFormat, cast: BlockCast) -> tuple[Tensor, Tensor]:
    """x (fp32) on the element grid, and its FP32 scale absmax / max, one a replica: FP8 with current scaling."""
    x = cast.pre_rounded(x)
    scale = fill_scale(replica_absmax(x), fmt.max)
    return round_to_grid(x / scale, fmt, cast.rounding), scale


def replica_absmax(x: Tensor) -> Tensor:
    """The largest magnitude of x (fp32), 0-dim; of a stack [S, rows, columns] that of each replica, [S, 1, 1]."""
    bits = absmax_bits(x, (-2, -1)) if x.ndim == 3 else absmax_bits(x.flatten(), 0).squeeze(0)
    return bits.view(torch.float32)


def replica_scale(x: Tensor, fmt: str, cast: BlockCast) -> Tensor | None:
    """The tensor scale of each replica of x (fp32) beside its block scales, of which NVFP4 has one."""
    return nvfp4_tensor_scale(replica_absmax(cast.pre_rounded(x))) if fmt == NVFP4 else None


def gemm(a_MK: Operand, b_KN: Operand, dtype: torch.dtype) -> Tensor:
    """[M, N] or [S, M, N], accumulated in FP32, scaled, rounded once to `dtype`."""
    a, b = a_MK.values, b_KN.values
    scales = [scale for scale in (a_MK.scale, b_KN.scale) if scale is not None]
    if not scales:
        return to_dtype(a @ b, dtype)
    product = torch.mm if a.ndim == 2 else torch.bmm
    accumulated = a @ b if a.dtype == torch.float32 else product(a, b, out_dtype=torch.float32)
    return to_dtype(accumulated * math.prod(scales), dtype)


def mx_linear(x: Tensor, weight: Tensor, gemms: Gemms, cast: BlockCast, dtype: torch.dtype | None = None) -> Tensor:
    """x [..., in] times weight [out, in] transposed -> [..., out]; of a stack [S, ..., in] and [S, out, in].

    x and weight are bf16 or fp32. `dtype`: of unquantised operands and of every GEMM's result; x's if not given.
    """
    stacked = weight.ndim - 2
    h_TO = _MXLinear.apply(x.flatten(stacked, -2), weight, gemms, cast, dtype or x.dtype)
    return h_TO.unflatten(stacked, x.shape[stacked:-1])


class _MXLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, gemms: Gemms, cast: BlockCast, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.gemms, ctx.cast = gemms, cast
        return forward_gemm(x_TI, weight_OI, gemms, cast, dtype)

    @staticmethod
    def backward(ctx: Any, dh_TO: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x_TI, weight_OI = ctx.saved_tensors
        dx_TI = dgrad_gemm(dh_TO, weight_OI, ctx.gemms, ctx.cast)
        dweight_OI = wgrad_gemm(dh_TO, x_TI, ctx.gemms, ctx.cast)
        return to_dtype(dx_TI, x_TI.dtype), to_dtype(dweight_OI, weight_OI.dtype), None, None, None


def forward_gemm(
    x_TI: Tensor,
    weight_OI: Tensor,
    gemms: Gemms,
    cast: BlockCast,
    dtype: torch.dtype,
    bound: Tensor | None = None,
) -> Tensor:
    """`bound`: what no |x| exceeds, where that is known."""
    w = operand(weight_OI, gemms.forward_w, -1, gemms, cast, dtype)
    return gemm(forward_operand(x_TI, gemms, cast, dtype, bound), w.T, dtype)


def forward_operand(x_TI: Tensor, gemms: Gemms, cast: BlockCast, dtype: torch.dtype, bound: Tensor | None) -> Operand:
    tensor_scale = nvfp4_row_scales(x_TI, bound, cast) if gemms.forward_x == NVFP4 else None
    return operand(x_TI, gemms.forward_x, -1, gemms, cast, dtype, tensor_scale)


def nvfp4_row_scales(x_TI: Tensor, bound: Tensor | None, cast: BlockCast) -> Tensor:
    """One tensor scale a token, so that none depends on its neighbours; that of the bound needs no pass over x."""
    if bound is None:
        bound = absmax_bits(cast.pre_rounded(to_dtype(x_TI, torch.float32)), -1).view(torch.float32)
    return nvfp4_tensor_scale(bound)


def dgrad_gemm(dh_TO: Tensor, weight_OI: Tensor, gemms: Gemms, cast: BlockCast) -> Tensor:
    dh = operand(dh_TO, gemms.dgrad_dh, -1, gemms, cast, dh_TO.dtype)
    w = operand(weight_OI, gemms.dgrad_w, -2, gemms, cast, dh_TO.dtype)
    return gemm(dh, w, dh_TO.dtype)


def wgrad_gemm(dh_TO: Tensor, x_TI: Tensor, gemms: Gemms, cast: BlockCast) -> Tensor:
    dh = operand(dh_TO, gemms.wgrad_dh, -2, gemms, cast, dh_TO.dtype)
    x = operand(x_TI, gemms.wgrad_x, -2, gemms, cast, dh_TO.dtype)
    return gemm(dh.T, x, dh_TO.dtype)
