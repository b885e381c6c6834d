"""Norm, linear, activation, linear as one function; between GEMMs it reads every tensor once, and casts it twice.

    forward    y = norm(x)    h = Q(y) Q(U)^T    z = phi(h)    o = Q(z) Q(D)^T        U [up, in], D [out, inner]
               out = o, or x + o + b where the block is residual

The results are those of `norm_linear`, an activation and `mx_linear` one after another. That path is the oracle, and
also computes what has no kernel: NVFP4, one scale a tensor, native GEMMs, a norm that rounds every operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxstudy.blocks.plans import PLAIN, settings_of
from mxstudy.config.casts import BlockCast, Gemms
from mxstudy.kernels import (
    RowNorm,
    activation_backward_cast_both,
    activation_cast_both,
    cast_both,
    linear_gradients,
    norm_backward_add,
    norm_cast_both,
    product,
)
from mxstudy.kernels.cast_both import cast_both_with
from mxstudy.kernels.operators import Held, checked_casts, operand
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.norm_linear import center, norm_backward, normalize

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class NormMLP:
    """Settings of `norm_mlp`. `norm`: None leaves x as it is. `round_norm`: round the norm's output to bf16 first.

    `gate_dtype`, `dtype`: bf16 to round phi(gate) and the activation's result to it, float32 for no rounding;
    `bias_dtype`: the same for o + b. The sum with x is rounded to x's dtype.
    """

    norm: RowNorm | None
    activation: str
    up: Gemms
    down: Gemms
    cast: BlockCast
    fold_gain: bool = False
    round_norm: bool = False
    gate_dtype: torch.dtype = FP32
    dtype: torch.dtype = FP32
    bias_dtype: torch.dtype = FP32


def why_not(gemms: Gemms, cast: BlockCast) -> str | None:
    """Return why the kernels cannot make all operands of those GEMMs, or None if they can.

    Every operand must have the run's settings, because a kernel makes two at once. A block that quantises nothing has a
    reason as well, because kernels save nothing there.
    """
    if reason := PLAIN.why_not(gemms):
        return reason
    for name, operand_cast in gemms.casts():
        if settings_of(operand_cast) != cast:
            return f"{name}: its recipe fixes what the run's settings leave open"
    return None if any(gemms.casts()) else "nothing is quantised"


def norm_mlp(
    x: Tensor,
    gain: Tensor | None,
    bias: Tensor | None,
    up: Tensor | Held,
    down: Tensor | Held,
    b: Tensor | None,
    settings: NormMLP,
) -> Tensor:
    """Return the MLP's output [S, T, out]: bf16, or x's dtype if b is given.

    x [S, T, in] bf16 or fp32; gain, bias and b [S, 1, in]; up [S, up, in]; down [S, out, inner]. A weight may be given
    as its held operands if no gain is folded into it. Without a stack there is no S, and gain, bias and b are [in].
    Raises ConfigError as the kernels do.
    """
    (up, up_dgrad), (down, down_dgrad) = (w[:2] if isinstance(w, Held) else (w, None) for w in (up, down))
    return _NormMLP.apply(x, gain, bias, up, up_dgrad, down, down_dgrad, b, settings)


def hold(weight: Tensor, gemms: Gemms, cast: BlockCast) -> Held:
    """Return the operands of the weight [..., out, in]. Call `recast` after the weight has changed."""
    how = checked_casts(weight.shape, gemms.format("forward_w"), gemms.format("dgrad_w"), cast)
    forward, dgrad = cast_both_with(weight.detach(), how)
    return Held(forward.requires_grad_(), dgrad, how)


@torch.no_grad()
def recast(weight: Tensor, held: Held) -> None:
    """Cast the weight anew into its held operands, in place."""
    for old, new in zip(held[:2], cast_both_with(weight, held.casts), strict=True):
        old.copy_(new)


def weight_operands(weight: Tensor, gain: Tensor | None, gemms: Gemms, cast: BlockCast) -> tuple[Tensor, Tensor]:
    """Return the operands of the forward, with the gain folded in if one is given, and of dgrad."""
    if gain is None:
        return cast_both(weight, gemms.format("forward_w"), gemms.format("dgrad_w"), cast)
    folded = to_dtype(weight, FP32) * to_dtype(gain, FP32)
    return operand(folded, gemms.format("forward_w"), -1, cast), operand(weight, gemms.format("dgrad_w"), -2, cast)


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gain: Tensor | None,
        bias: Tensor | None,
        up: Tensor,
        up_dgrad: Tensor | None,
        down: Tensor,
        down_dgrad: Tensor | None,
        b: Tensor | None,
        s: NormMLP,
    ) -> Tensor:
        """Return the MLP's output, and save the tensors that the backward reads, its operands already cast."""
        ctx.dtypes = up.dtype, down.dtype
        mean = rms = None
        if s.norm is None:
            y, y_wgrad = cast_both(x, s.up.format("forward_x"), s.up.format("wgrad_x"), s.cast)
        else:
            own_gain, formats = None if s.fold_gain else gain, (s.up.format("forward_x"), s.up.format("wgrad_x"))
            y, y_wgrad, _, mean, rms = norm_cast_both(
                x, own_gain, s.norm, *formats, s.cast, bias=bias, round_output=s.round_norm
            )
        if up_dgrad is None:
            up, up_dgrad = weight_operands(up, gain if s.fold_gain else None, s.up, s.cast)
        h = product(y, up.mT)
        z, z_wgrad = activation_cast_both(
            h,
            s.activation,
            s.down.format("forward_x"),
            s.down.format("wgrad_x"),
            s.cast,
            gate_dtype=s.gate_dtype,
            dtype=s.dtype,
        )
        if down_dgrad is None:
            down, down_dgrad = weight_operands(down, None, s.down, s.cast)
        ctx.save_for_backward(x, mean, rms, gain, bias, y_wgrad, up_dgrad, h, z_wgrad, down_dgrad, b)
        ctx.settings = s
        o = product(z, down.mT)
        if b is None:
            return o
        return x + to_dtype(to_dtype(o, s.bias_dtype) + to_dtype(b, s.bias_dtype), x.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rms, gain, bias, y_wgrad, up_dgrad, h, z_wgrad, down_dgrad, b = ctx.saved_tensors
        s: NormMLP = ctx.settings
        formats = s.down.format("dgrad_dh"), s.down.format("wgrad_dh")
        do_dgrad, do_wgrad = cast_both(to_dtype(dout, BF16), *formats, s.cast)
        ddown, dz = linear_gradients(do_wgrad, z_wgrad, do_dgrad, down_dgrad)
        dh_dgrad, dh_wgrad, _ = activation_backward_cast_both(
            dz,
            h,
            s.activation,
            s.up.format("dgrad_dh"),
            s.up.format("wgrad_dh"),
            s.cast,
            gate_dtype=s.gate_dtype,
            dtype=s.dtype,
        )
        dup, dy = linear_gradients(dh_wgrad, y_wgrad, dh_dgrad, up_dgrad)
        dup = to_dtype(dup, FP32) * to_dtype(gain, FP32) if s.fold_gain else dup
        dup, ddown = (to_dtype(dw, dtype) for dw, dtype in zip((dup, ddown), ctx.dtypes, strict=True))
        dx, dgain, dbias, db = through_norm(dy, dout, x, mean, rms, gain, bias, b, s)
        return dx, dgain, dbias, dup, None, ddown, None, db, None


def through_norm(
    dy: Tensor,
    dout: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    b: Tensor | None,
    s: NormMLP,
) -> tuple[Tensor | None, ...]:
    """Return dx, dgain, dbias and db."""
    if rms is None:
        dx = to_dtype(dy, x.dtype)
        return (dx, None, None, None) if b is None else (dout + dx, None, None, rounded_sum(dout, b, s))
    assert gain is not None
    if b is None:
        xbar = normalize(center(x, mean), rms)
        dx, dgain, dbias = norm_backward(to_dtype(dy, FP32), xbar, rms, gain, bias, centers=mean is not None)
        return to_dtype(dx, x.dtype), dgain, dbias, None
    sums_dout = dout.dtype == s.bias_dtype  # else dout is rounded before it is summed
    dx, (dgain, dbias, *of_dout) = norm_backward_add(dy, x, mean, rms, gain, dout, sums=2 + sums_dout)
    dbias = None if bias is None else to_dtype(dbias, bias.dtype)
    db = to_dtype(to_dtype(of_dout[0], s.bias_dtype), b.dtype) if sums_dout else rounded_sum(dout, b, s)
    return dx, to_dtype(dgain, gain.dtype), dbias, db


def rounded_sum(dout: Tensor, b: Tensor, s: NormMLP) -> Tensor:
    """Return db, the sum of dout, whose elements are first rounded to the settings' `bias_dtype`."""
    return to_dtype(to_dtype(dout, s.bias_dtype).sum_to_size(b.shape), b.dtype)
