"""A decoder block as two functions, one before its attention and one after; the attention between them is torch's.

    before    q | k | v = Q(norm(x)) Q(Wqkv)^T, q and k rotated
    after     h = x + Q(a) Q(Wo)^T      g = Q(norm(h)) Q(Wup)^T      out = h + Q(phi(g)) Q(Wdown)^T

The results have the bits of the linears and the activation one after another, but where a GEMM's operand is a view
there, after a Hadamard transform along the tokens. That path is the oracle, and also computes what has no kernel. The
forward saves x, a, h and g in bf16, and one number per row. Every operand is cast in a pass that reads it, or its
source, anyway. The forward casts along the rows only. The backward casts dH along both axes, for dgrad and wgrad. Along
the columns it also casts the tensors that the forward cast along the rows; phi(g) is cast by the kernel that makes dg.
The absmax of a tensor that both of its casts need is found once, and saved for the backward. A weight is cast when it
is read, once for each GEMM, because held operands would cost memory, and under FSDP whole weights. An unquantised
operand is made in the same passes, and only rounded to bf16. A block that `recomputes_up` does not save g: the backward
casts the same operands anew and multiplies them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy.blocks.operands import (
    PlannedLinear,
    cast_gradient,
    cast_operand,
    finish_gradient,
    finish_operand,
    planned,
    shared_absmax,
)
from mxstudy.blocks.plans import LinearPlan
from mxstudy.config.casts import BlockCast
from mxstudy.kernels import (
    RowNorm,
    activation_backward_cast_both,
    activation_cast_both,
    heads_cast_both,
    norm_backward_add,
    norm_cast_both,
    rotate_heads_,
    scaled_product,
)
from mxstudy.kernels.operators import UNREAD
from mxstudy.numerics.gemms import Operand
from mxstudy.numerics.grid import to_dtype

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class FusedBlock:
    """A fused block's settings. Both norms are alike; `activation`: a row of `kernels.activation.ACTIVATIONS`.

    `cast`: the settings with which the kernel that makes a tensor also makes its operands. `sizes`: the sizes of
    queries, keys and values, over all heads of `head_size`. `recomputes_up`: whether the backward computes the product
    of the MLP's first linear again, so that it is not kept.
    """

    norm: RowNorm
    fold_gain: bool
    activation: str
    sizes: tuple[int, int, int]
    head_size: int
    cast: BlockCast
    qkv: LinearPlan
    out: LinearPlan
    up: LinearPlan
    down: LinearPlan
    recomputes_up: bool = field(default=False, kw_only=True)


class Absmax(NamedTuple):
    """The absmax of a linear's X and of its W, which both of their operands need, or None (`shared_absmax`)."""

    x: Tensor | None
    w: Tensor | None


Affine = tuple[Tensor, Tensor | None]  # gain and bias [in], bf16
Keys = tuple[Tensor | None, ...]  # the random streams: the keys of each linear, then the shared places


def split_heads(qkv: Tensor, sizes: Sequence[int], head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [..., T, qkv] into q, k and v [..., T, heads, H]; `sizes`: their sizes over all heads."""
    q, k, v = (part.unflatten(-1, (-1, head_size)) for part in qkv.split(list(sizes), dim=-1))
    return q, k, v


def before_attention(
    x: Tensor,
    affine: Affine,
    weight: Tensor,
    rope: Tensor | None,
    keys: Keys,
    settings: FusedBlock,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v [B, T, heads, H] from x [B, T, in] bf16 and weight [qkv, in] bf16 or fp32, and x again.

    `after_attention` must take that x, so that the kernel of the norm's gradient also adds the gradients of both uses.
    `rope`: the angles by which queries and keys are rotated, or None.
    """
    return _BeforeAttention.apply(x, *affine, weight, rope, *keys, settings)


def after_attention(
    x: Tensor, a: Tensor, out: Tensor, affine: Affine, up: Tensor, down: Tensor, keys: Keys, settings: FusedBlock
) -> tuple[Tensor, Tensor]:
    """Return the block's output and h, the input of the second norm; h carries no gradient.

    x [..., D] bf16 is the residual stream, a the attention's heads in the same shape; out, up and down are the weights.
    """
    y, h = _AfterAttention.apply(x.flatten(0, -2), a.flatten(0, -2), out, *affine, up, down, *keys, settings)
    return y.view_as(x), h.view_as(x)


class _BeforeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        gain: Tensor,
        bias: Tensor | None,
        weight: Tensor,
        rope: Tensor | None,
        keys: Tensor | None,
        places: Tensor | None,
        s: FusedBlock,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = x_BTD.flatten(0, 1)
        qkv, _, mean, rms, absmax = norm_linear(x, None, gain, bias, weight, planned(s.qkv, keys, places), s)
        if rope is not None:
            rotate_heads_(qkv, rope, s.sizes[0] + s.sizes[1], s.head_size)
        q, k, v = split_heads(qkv.unflatten(0, x_BTD.shape[:2]), s.sizes, s.head_size)
        ctx.save_for_backward(x, mean, rms, gain, bias, weight, rope, keys, places, *absmax)
        ctx.settings = s
        return q, k, v, x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, dstream: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rms, gain, bias, weight, rope, keys, places, *absmax = ctx.saved_tensors
        s: FusedBlock = ctx.settings
        qkv = planned(s.qkv, keys, places)
        made = heads_cast_both(dq, dk, dv, rope, *s.qkv.gradient_formats, s.cast)
        operands = finish_gradient(made, qkv)
        source, dstream_TD = NormInput(x, mean, rms, gain, bias), dstream.flatten(0, 1)
        dx, dgain, dbias, dweight = norm_linear_backward(operands, dstream_TD, source, weight, qkv, s, Absmax(*absmax))
        return dx.view_as(dstream), dgain, dbias, dweight, None, None, None, None


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        out: Tensor,
        gain: Tensor,
        bias: Tensor | None,
        up: Tensor,
        down: Tensor,
        out_keys: Tensor | None,
        up_keys: Tensor | None,
        down_keys: Tensor | None,
        places: Tensor | None,
        s: FusedBlock,
    ) -> tuple[Tensor, Tensor]:
        keys = out_keys, up_keys, down_keys, places
        of_out, of_up, of_down = linears_of(s, keys)
        absmax_out = Absmax(shared_absmax(a, of_out, "forward_x"), weight_absmax(out, of_out))
        branch = scaled_product(
            cast_operand(a, of_out, "forward_x", absmax=absmax_out.x), forward_weight(out, of_out, absmax_out.w).T
        )
        g, h, mean, rms, absmax_up = norm_linear(x, branch, gain, bias, up, of_up, s)
        z, _ = activation_cast_both(g, s.activation, s.down.forward_x.fused_format, UNREAD, s.cast)
        absmax_down = Absmax(shared_absmax(z, of_down, "forward_x"), weight_absmax(down, of_down))
        z_forward = finish_operand(z, of_down, "forward_x", absmax_down.x)
        absmax = *absmax_out, *absmax_up, *absmax_down
        kept_g = None if s.recomputes_up else g
        ctx.save_for_backward(a, h, mean, rms, gain, bias, kept_g, out, up, down, *keys, *absmax)
        ctx.mark_non_differentiable(h)
        ctx.settings = s
        return h + scaled_product(z_forward, forward_weight(down, of_down, absmax_down.w).T), h

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        a, h, mean, rms, gain, bias, g, out, up, down, *rest = ctx.saved_tensors
        keys, absmax_out, absmax_up, absmax_down = rest[:4], Absmax(*rest[4:6]), Absmax(*rest[6:8]), Absmax(*rest[8:])
        s: FusedBlock = ctx.settings
        source = NormInput(h, mean, rms, gain, bias)
        of_out, of_up, of_down = linears_of(s, keys)
        dgrad, wgrad = cast_gradient(dy, of_down, s.cast)
        dz = scaled_product(dgrad, dgrad_weight(down, of_down, dy, absmax_down.w))
        if g is None:
            g = norm_linear_again(source, up, of_up, s, absmax_up, after=dz)
        *dg, z = activation_backward_cast_both(
            dz,
            g,
            s.activation,
            *s.up.gradient_formats,
            s.cast,
            again=s.down.wgrad_x.fused_format,
        )
        z_wgrad = finish_operand(z, of_down, "wgrad_x", absmax_down.x)
        ddown = to_dtype(scaled_product(wgrad.T, z_wgrad), down.dtype)
        operands = finish_gradient((dg[0], dg[1]), of_up)
        dx, dgain, dbias, dup = norm_linear_backward(operands, dy, source, up, of_up, s, absmax_up)
        dgrad, wgrad = cast_gradient(dx, of_out, s.cast)
        da = scaled_product(dgrad, dgrad_weight(out, of_out, dx, absmax_out.w))
        dout = scaled_product(wgrad.T, cast_operand(a, of_out, "wgrad_x", after=dx, absmax=absmax_out.x))
        return dx, da, to_dtype(dout, out.dtype), dgain, dbias, dup, ddown, *(None,) * 5


def linears_of(s: FusedBlock, keys: Sequence[Tensor | None]) -> tuple[PlannedLinear, PlannedLinear, PlannedLinear]:
    """Return the three linears after the attention: out, up, down."""
    *linear_keys, places = keys
    out, up, down = (planned(p, k, places) for p, k in zip((s.out, s.up, s.down), linear_keys, strict=True))
    return out, up, down


class NormInput(NamedTuple):
    """The input x of a norm, and what the norm makes of it: its mean if it centers, its RMS, and its parameters."""

    x: Tensor
    mean: Tensor | None
    rms: Tensor
    gain: Tensor
    bias: Tensor | None

    def parts(self, s: FusedBlock) -> dict[str, Tensor | None]:
        """Return what a cast does to x before it casts; a gain that is folded into the weight is not part of it."""
        return {"mean": self.mean, "rms": self.rms, "gain": None if s.fold_gain else self.gain, "bias": self.bias}


def norm_linear(
    x: Tensor,
    branch: Tensor | None,
    gain: Tensor,
    bias: Tensor | None,
    weight: Tensor,
    linear: PlannedLinear,
    s: FusedBlock,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Absmax]:
    """Return Q(norm(x + branch)) Q(W)^T, x + branch with its mean and rms, and the absmax that the backward reads."""
    own, folded = (None, gain) if s.fold_gain else (gain, None)
    plan = linear.plan.forward_x
    fmt = plan.fused_format if plan.is_fused else UNREAD
    y, _, total, mean, rms = norm_cast_both(x, own, s.norm, fmt, UNREAD, s.cast, bias=bias, branch=branch)
    parts = NormInput(total, mean, rms, gain, bias).parts(s)
    absmax = Absmax(shared_absmax(total, linear, "forward_x", **parts), weight_absmax(weight, linear, folded))
    x_forward = Operand(y) if plan.is_fused else cast_operand(total, linear, "forward_x", absmax=absmax.x, **parts)
    w = forward_weight(weight, linear, absmax.w, folded)
    return scaled_product(x_forward, w.T), total, mean, rms, absmax


def norm_linear_again(
    source: NormInput, weight: Tensor, linear: PlannedLinear, s: FusedBlock, absmax: Absmax, after: Tensor
) -> Tensor:
    """Return the product of `norm_linear` with the same bits, from what it saved, in the backward.

    `after`: as in `cast_one`.
    """
    folded = source.gain if s.fold_gain else None
    y = cast_operand(source.x, linear, "forward_x", absmax=absmax.x, after=after, **source.parts(s))
    return scaled_product(y, forward_weight(weight, linear, absmax.w, folded, after).T)


def norm_linear_backward(
    dh: tuple[Operand, Operand],
    dstream: Tensor,
    source: NormInput,
    weight: Tensor,
    linear: PlannedLinear,
    s: FusedBlock,
    absmax: Absmax,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return dx (the stream's gradient included), dgain, dbias and dW. `dh`: dgrad's and wgrad's operands of dH."""
    (dgrad, wgrad), (x, mean, rms, gain, bias) = dh, source
    y = cast_operand(x, linear, "wgrad_x", absmax=absmax.x, after=dgrad.values, **source.parts(s))
    dweight = scaled_product(wgrad.T, y)
    if s.fold_gain:
        dweight = to_dtype(to_dtype(dweight, FP32) * to_dtype(gain, FP32), BF16)
    dy = scaled_product(dgrad, dgrad_weight(weight, linear, dgrad.values, absmax.w))
    dx, sums = norm_backward_add(dy, x, mean, rms, gain, dstream, sums=1 if bias is None else 2)
    dbias = None if bias is None else to_dtype(sums[1], bias.dtype)
    return dx, to_dtype(sums[0], gain.dtype), dbias, to_dtype(dweight, weight.dtype)


def forward_weight(
    weight: Tensor,
    linear: PlannedLinear,
    absmax: Tensor | None,
    gain: Tensor | None = None,
    after: Tensor | None = None,
) -> Operand:
    """Return the forward's operand of the weight [out, in]; `absmax`, `gain` and `after` as in `cast_operand`."""
    return cast_operand(weight, linear, "forward_w", absmax=absmax, gain=gain, after=after)


def dgrad_weight(weight: Tensor, linear: PlannedLinear, after: Tensor, absmax: Tensor | None) -> Operand:
    """Return dgrad's operand of the weight [out, in], made in the backward after `after`."""
    return cast_operand(weight, linear, "dgrad_w", absmax=absmax, after=after)


def weight_absmax(weight: Tensor, linear: PlannedLinear, gain: Tensor | None = None) -> Tensor | None:
    """Return the absmax that forward and dgrad share; they share none if the forward's weight has a gain folded in."""
    return shared_absmax(weight, linear, "forward_w") if gain is None else None
