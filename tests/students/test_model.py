"""The student agrees with a plain loop over replicas, also compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from each import each, slow_but
from small_students import (
    ATTENTION,
    BF16,
    CAST,
    EPS,
    FP32,
    LAYER_NORM,
    LAYERS,
    NORMS,
    SIZE,
    TOKENS,
    run,
    samples,
    set_casts,
    small,
    student,
)
from torch import Tensor

from mxstudy.config import PRECISIONS, Gemms
from mxstudy.numerics import fake_quantize
from mxstudy.reader import ConfigError
from mxstudy.students.model import VECTOR_OPS, ResidualMLP

# ------------------------------------------------------------------------------------------ a plain loop over replicas


class PlainLinear(torch.autograd.Function):
    """Multiplies three matrix products, each of operands quantised along the axis that it sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gemms: Gemms, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemms, ctx.dtype = gemms, dtype
        return product(x, gemms.format("forward_x"), weight.T, gemms.format("forward_w"), dtype)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x, weight), gemms = ctx.saved_tensors, ctx.gemms
        dx = product(dh, gemms.format("dgrad_dh"), weight, gemms.format("dgrad_w"), ctx.dtype)
        dweight = product(dh.T, gemms.format("wgrad_dh"), x, gemms.format("wgrad_x"), ctx.dtype)
        return dx.to(x.dtype), dweight.float(), None, None


def product(a: Tensor, a_format: str | None, b: Tensor, b_format: str | None, dtype: torch.dtype) -> Tensor:
    def operand(t: Tensor, fmt: str | None, axis: int) -> Tensor:
        if fmt is None:
            return t.to(dtype).float()
        halves = ((t.float().view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)  # rounds to bf16, ties away
        size = t.shape[axis]
        halves = F.pad(halves, [0, -size % 32] if axis == 1 else [0, 0, 0, -size % 32])
        return fake_quantize(halves, fmt, axis=axis, scale_rule="floor", rounding="away").narrow(axis, 0, size)

    return (operand(a.contiguous(), a_format, 1) @ operand(b.contiguous(), b_format, 0)).to(dtype)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt() * gain + bias


def layer_norm_bf16(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    x = x.bfloat16()
    centered = x - x.sum(-1, keepdim=True) / SIZE
    inverse = 1 / ((centered * centered).sum(-1, keepdim=True) / SIZE + EPS).sqrt()
    return ((centered * inverse).float() * gain).bfloat16() + bias.bfloat16()


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain


def silu_gated(h: Tensor, gate: torch.dtype) -> Tensor:
    one, other = h[:, : h.shape[1] // 2], h[:, h.shape[1] // 2 :]
    return F.silu(one.to(gate)) * other


PHI: dict[str, Callable[..., Tensor]] = {
    "relu": lambda h, gate: h.clamp_min(0),
    "gelu": lambda h, gate: F.gelu(h),
    "swiglu": silu_gated,
}


def attention(qkv: Tensor, heads: int, length: int, softmax: torch.dtype, compute: torch.dtype) -> Tensor:
    """Compute attention, sequence after sequence and head after head: [T, 3 D] -> [T, D]."""

    def one(rows: slice, columns: range) -> Tensor:
        q, k, v = (qkv[rows, start + columns.start : start + columns.stop] for start in range(0, 3 * SIZE, SIZE))
        scores = product(q, None, k.T, None, compute).to(softmax) * len(columns) ** -0.5
        return product(scores.softmax(-1), None, v, None, compute)

    sequences = [slice(start, start + length) for start in range(0, len(qkv), length)]
    of_heads = [range(SIZE)[start : start + SIZE // heads] for start in range(0, SIZE, SIZE // heads)]
    return torch.cat([torch.cat([one(rows, columns) for columns in of_heads], dim=1) for rows in sequences])


def plain(mlp: ResidualMLP, x: Tensor, dy: Tensor, ops: str, row: str, compute: torch.dtype) -> dict[str, Tensor]:
    """Compute replica after replica, in matrices, rounded as the paper's text (bf16) or its code does."""
    stream, phi_dtype = (BF16 if ops == "bf16" else FP32), (BF16 if ops == "bf16" else FP32)
    gate = FP32 if ops == "fp32" else BF16
    results = []
    for r in range(len(dy)):
        leaf = {
            n: (p[r, 0] if p.shape[1] == 1 else p[r]).detach().clone().requires_grad_()
            for n, p in mlp.named_parameters()
        }

        def linear(name: str, x: Tensor, leaf: dict[str, Tensor] = leaf) -> Tensor:
            return PlainLinear.apply(x, leaf[f"{name}.weight"], PRECISIONS[row], compute)

        def normed(name: str, a: Tensor, leaf: dict[str, Tensor] = leaf) -> Tensor:
            affine = [leaf[n] for n in (f"{name}.norm.weight", f"{name}.norm.bias") if n in leaf]
            norm = {0: lambda x: x, 1: rms_norm, 2: layer_norm_bf16 if ops == "code" else layer_norm}[len(affine)]
            if ops == "bf16":
                affine[1:] = [bias.bfloat16().float() for bias in affine[1:]]
            y = norm(a if ops == "code" else a.float(), *affine)
            return y.to(BF16) if ops == "bf16" else y

        a, model = x.to(stream), mlp.config
        for k in range(LAYERS):
            if model.attention_heads:
                name = f"layers.{k}.attention"
                qkv = linear(f"{name}.qkv", normed(f"{name}.qkv", a))
                mixed = attention(qkv, model.attention_heads, model.sequence_length, phi_dtype, compute)
                a = a + linear(f"{name}.out", mixed).to(stream)
            h = linear(f"layers.{k}.up", normed(f"layers.{k}.up", a))
            y = linear(f"layers.{k}.down", PHI[model.activation](h.to(phi_dtype), gate))
            y = y.to(gate) + leaf[f"layers.{k}.bias"].to(gate)
            a = a + y.to(stream)
        a.float().backward(dy[r])
        results.append({"y": a.detach().float()} | {n: p.grad for n, p in leaf.items()})
    return {name: torch.stack([result[name] for result in results]) for name in results[0]}


@each("norm", ["none", "layernorm", "rmsnorm"])
@each("model", [{"activation": "relu"}, {}, {"activation": "swiglu"}, ATTENTION], ids=str)
def test_unquantised_it_is_the_plain_loop(norm: str, model: dict[str, Any]) -> None:
    mlp = student(small(**model), NORMS[norm], [3, 1, 2])
    x, dy = samples(TOKENS, SIZE), samples(3, TOKENS, SIZE)
    want = plain(mlp, x, dy, "fp32", "fp32", FP32)
    for name, got in run(mlp, x, dy).items():
        assert (got.view_as(want[name]) - want[name]).norm() < 1e-6 * want[name].norm(), name


@pytest.mark.integration
@pytest.mark.parametrize("ops", VECTOR_OPS)
@pytest.mark.parametrize("row", slow_but(["mxfp8_bf16_act", "mx_mix"], ["bf16", "mxfp8", "mx_mix", "mxfp8_bf16_act"]))
@pytest.mark.parametrize("model", [{}, {"activation": "swiglu"}, ATTENTION], ids=str)
def test_quantised_it_is_the_plain_loop(ops: str, row: str, model: dict[str, Any]) -> None:
    """The forward has every bit of the plain loop.

    In the code's norm, the loop's gradients take the same roundings in another order. In attention, a sum in another
    order is rounded to bf16, and may become a neighbour.
    """
    mlp = student(small(**model), LAYER_NORM, [3, 1], row, BF16, vector_ops=ops)
    x, dy = samples(TOKENS, SIZE), samples(2, TOKENS, SIZE)
    want, got = plain(mlp, x, dy, ops, row, BF16), run(mlp, x, dy)
    assert torch.equal(got["y"], want["y"])
    for other in VECTOR_OPS.keys() - {ops}:
        assert not torch.equal(got["y"], plain(mlp, x, dy, other, row, BF16)["y"])
    exact, attends = ops != "code", model == ATTENTION
    tolerance = {(True, False): 1e-4, (True, True): 1e-3, (False, False): 2.0**-5, (False, True): 2.0**-4}
    for name in got:
        assert (got[name].view_as(want[name]) - want[name]).norm() < tolerance[exact, attends] * want[name].norm(), name


@each("row", ["mxfp8", "mx_mix", "mxfp8_bf16_act"])
def test_swiglus_inner_size_as_in_the_public_code(row: str) -> None:
    """8 * 64 / 3 is 171, and both parts are 342: five and ten whole blocks, and a part of one."""
    mlp = student(small(activation="swiglu", swiglu_multiple=1), LAYER_NORM, [3, 1], row, BF16, vector_ops="bf16")
    assert (mlp.layers[0].up.weight.shape, mlp.layers[0].down.weight.shape) == ((2, 342, SIZE), (2, SIZE, 171))
    x, dy = samples(TOKENS, SIZE), samples(2, TOKENS, SIZE)
    with pytest.raises(ConfigError, match="block_size: 32 does not divide"):
        run(mlp, x, dy)
    set_casts(mlp, row, replace(CAST, pad_blocks=True))
    want, got = plain(mlp, x, dy, "bf16", row, BF16), run(mlp, x, dy)
    assert torch.equal(got["y"], want["y"])
    for name in got:
        assert (got[name].view_as(want[name]) - want[name]).norm() < 1e-4 * want[name].norm(), name


@pytest.mark.parametrize("skipped", [False, True])
def test_the_norms_may_be_rounded_otherwise_than_the_rest(skipped: bool) -> None:
    """Norms may be rounded in another way than the rest.

    Unrounded, they give what an FP32 norm of the same residual stream gives. Skipped as in the public code, they nearly
    do.
    """
    options = {"row": "mxfp8", "compute": BF16, "vector_ops": "code"}
    x, dy = samples(TOKENS, SIZE), samples(1, TOKENS, SIZE)
    mlp = student(small(), LAYER_NORM, [3], norm_ops="code_skipped" if skipped else "fp32", **options)
    up = mlp.layers[0].up
    exact = layer_norm(x, up.norm.weight[0, 0], up.norm.bias[0, 0])
    read = up.norm.apply_affine(x[None], *up.gain_and_bias(x)).float()
    error = ((read - exact).norm() / exact.norm()).item()
    assert (2.0**-10 < error < 2.0**-7) if skipped else error < 1e-6
    assert (mlp.layers[1].ops.residual, mlp.layers[1].ops.bias) == (FP32, BF16)
    outputs = [run(student(small(), LAYER_NORM, [3], norm_ops=ops, **options), x, dy)["y"] for ops in (None, "code")]
    assert torch.equal(*outputs)
    assert not torch.equal(run(mlp, x, dy)["y"], outputs[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ops", "gain", "model", "norm_ops"),
    [
        ("fp32", "mx", {}, None),
        ("code", "bf16", ATTENTION, None),
        ("code", "fp32", {"activation": "swiglu", "swiglu_multiple": 1}, "code_skipped"),
    ],
    ids=str,
)
def test_compiled(ops: str, gain: str, model: dict[str, Any], norm_ops: str | None) -> None:
    """It compiles to one graph.

    Where a compiled sum differs in its last bit, a few elements are quantised to a neighbour.
    """
    torch._dynamo.reset()
    options = {"vector_ops": ops, "gain": gain, "norm_ops": norm_ops}
    mlp = student(small(num_layers=1, **model), LAYER_NORM, [3, 1], "mxfp8", BF16, **options)
    if norm_ops:  # with all that the public code does to a cast
        set_casts(mlp, "mxfp8", replace(CAST, scale_rule="code_bump", pad_blocks=True))
    x, dy = samples(TOKENS, SIZE), samples(2, TOKENS, SIZE)
    want = run(mlp, x, dy)
    mlp.compile(fullgraph=True)
    with inductor.patch(emulate_precision_casts=True):
        got = run(mlp, x, dy)
    for name in want:
        assert (got[name] - want[name]).norm() < 0.01 * want[name].norm(), name
