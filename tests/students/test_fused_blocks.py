"""A block whose norm, linears and activation are one function gives the bits of separate ones."""

from __future__ import annotations

import pytest
import torch
from each import each
from small_students import BF16, FP32, NORMS, TOKENS, run, samples, small, student

from mxstudy.reader import ConfigError
from mxstudy.students.model import ACTIVATIONS, VECTOR_OPS, StudentBlock
from mxstudy.train.runtime import configure_torch

ROWS = ("mxfp8", "mx_mix", "mxfp8_forward_only", "mxfp8_act_only", "mxfp4")


def blocks(mlp):
    return [module for module in mlp.modules() if isinstance(module, StudentBlock)]


def both(norm="layernorm", activation="gelu", vector_ops="fp32", row="mxfp8", compute=BF16, **options):
    """Return outputs and gradients of a stack of two, one after another and fused."""
    mlp = student(small(activation=activation), NORMS[norm], [0, 1], row, compute, vector_ops=vector_ops, **options)
    x, dy = samples(2, TOKENS, 64), samples(2, TOKENS, 64).flip(0)
    apart = run(mlp, x, dy)
    mlp.use_kernels()
    return mlp, apart, run(mlp, x, dy)


def assert_same(apart, fused):
    assert apart.keys() == fused.keys()
    for name, values in apart.items():
        assert torch.equal(values, fused[name]), name


@pytest.mark.integration
@each("row", ROWS)
@each("vector_ops", ["fp32", "bf16"])
def test_formats(row, vector_ops):
    """Compare blocks with ReLU: on some processors PyTorch's GELU in bf16 is not its GELU in FP32, rounded."""
    mlp, apart, fused = both(activation="relu", row=row, vector_ops=vector_ops)
    assert all(block.fused for block in blocks(mlp))
    assert_same(apart, fused)


@pytest.mark.integration
@each("activation", ACTIVATIONS)
@each("vector_ops", VECTOR_OPS)
def test_activations(activation, vector_ops):
    _, apart, fused = both(norm="none", activation=activation, vector_ops=vector_ops)
    assert_same(apart, fused)


@pytest.mark.integration
@each("norm", NORMS)
@each("vector_ops", ["fp32", "bf16"])
def test_norms(norm, vector_ops):
    _, apart, fused = both(norm=norm, vector_ops=vector_ops)
    assert_same(apart, fused)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_bias_that_is_rounded_otherwise_than_the_sum(norm):
    mlp, apart, fused = both(norm=norm, vector_ops="code", norm_ops="fp32")
    assert all(block.fused for block in blocks(mlp))
    assert_same(apart, fused)


@each("norm", ["none", "layernorm"])
@each(
    ("vector_ops", "norm_ops"),
    [("fp32", None), ("bf16", None), ("code", None), ("fp32", "code"), ("fp32", "code_skipped"), ("bf16", "fp32")],
)
def test_fp32_gemms_on_tensor_cores_read_fp32_alone(norm, vector_ops, norm_ops):
    norm_ops = None if norm == "none" else norm_ops
    mlp, apart, fused = both(norm, vector_ops=vector_ops, row="fp32", compute=FP32, norm_ops=norm_ops)
    rounds_norm = norm != "none" and (norm_ops or vector_ops) != "fp32"
    assert {block.up.on_tensor_cores for block in blocks(mlp)} == {vector_ops != "bf16" and not rounds_norm}
    assert {block.down.on_tensor_cores for block in blocks(mlp)} == {vector_ops != "bf16"}
    for name, values in apart.items():
        assert torch.allclose(values, fused[name], rtol=0, atol=1e-5 * values.abs().max().item()), name


@pytest.mark.parametrize("gain", ["bf16", "mx"])
def test_rounded_gains(gain):
    _, apart, fused = both(gain=gain)
    assert_same(apart, fused)


@each("row", ["bf16", "fp8_tensor", "nvfp4_forward_only"])
def test_what_has_no_kernel_stays_apart(row):
    mlp = student(small(), NORMS["layernorm"], [0], row, BF16)
    mlp.use_kernels()
    assert not any(block.fused for block in blocks(mlp))


def test_a_norm_that_rounds_every_operation_stays_apart():
    mlp = student(small(), NORMS["layernorm"], [0], "mxfp8", BF16, vector_ops="code")
    mlp.use_kernels()
    assert not any(block.fused for block in blocks(mlp))


@each("place", ["up", "down"])
def test_a_linear_of_another_class_or_with_a_hook_is_not_lost(place):
    mlp = student(small(), NORMS["layernorm"], [0], "mxfp8", BF16)
    mlp.use_kernels()
    first, *_ = blocks(mlp)
    linear = getattr(first, place)
    hook = linear.register_forward_hook(lambda module, inputs, h: None)
    with pytest.raises(ConfigError, match=r"precision.backend: a hook of a \w+ is never called in a fused block"):
        run(mlp, samples(1, TOKENS, 64), samples(1, TOKENS, 64))
    hook.remove()
    linear.__class__ = type("Own", (type(linear),), {})
    mlp.use_kernels()
    assert first.fused is None
    assert "linear is a Own, which has no kernel" in first.why_not_fused_mlp()


@pytest.mark.slow
def test_compiled():
    configure_torch(compile=True)
    mlp, _, fused = both()
    mlp.compile()
    compiled = run(mlp, samples(2, TOKENS, 64), samples(2, TOKENS, 64).flip(0))
    assert compiled.keys() == fused.keys()
    for name, values in fused.items():
        assert torch.allclose(compiled[name], values, rtol=0, atol=1e-4), name
    torch._dynamo.reset()
