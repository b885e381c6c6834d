"""Callers meet the operators of `numerics.kernels` away from GPUs, in torch's compiler, and in refusals.

On a GPU their kernels run, which other tests compare with the same references.
"""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from each import each
from fused import (
    BF16,
    COMPOSED,
    DEVICE,
    activation_inputs,
    assert_beside,
    every_activation,
    every_norm,
    every_rounding_of_values,
    norm_inputs,
    normalized,
    rms_of,
)
from torch import library

from mxstudy.kernels import (
    RowNorm,
    activation_backward_cast_both,
    activation_cast_both,
    cast_both,
    cast_one,
    heads_cast_both,
    norm_cast_both,
    norm_codes,
    rotate_heads_,
)
from mxstudy.kernels.activation import ACTIVATIONS, Rounded
from mxstudy.kernels.norm_cast import Normed
from mxstudy.kernels.norm_codes import encoding
from mxstudy.kernels.operators import UNREAD, checked_casts
from mxstudy.kernels.packing import pack
from mxstudy.numerics import quantize
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cast_both_is_an_operator(dtype):
    """It has a schema and fake tensors, and is traced and compiled without a break."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    cast = BlockCast()
    library.opcheck(torch.ops.mxstudy.cast_both, (x, checked_casts(x.shape, "E4M3", None, cast)))
    compiled = torch.compile(cast_both, fullgraph=True)(x, "E4M3", "E5M2", cast)
    for one, other in zip(compiled, cast_both(x, "E4M3", "E5M2", cast), strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("name", ["relu", "swiglu"])
def test_activations_are_operators(name):
    """They have a schema and fake tensors, and are traced and compiled without a break."""
    h, dz = (x.to(DEVICE) for x in activation_inputs(name))

    def step(h, dz):
        operands = activation_cast_both(h, name, "E4M3", None, BlockCast())
        return *operands, *activation_backward_cast_both(dz, h, name, "E5M2", "E4M3", BlockCast())

    for one, other in zip(torch.compile(step, fullgraph=True)(h, dz), step(h, dz), strict=True):
        assert_same_bits(one, other)
    casts, known = checked_casts(dz.shape, "E4M3", None, BlockCast()), pack(Rounded(*ACTIVATIONS[name], True, True))
    library.opcheck(torch.ops.mxstudy.activation_cast_both, (h, known, casts))
    for again in (UNREAD, "E4M3"):
        at = (dz, h, known, casts, checked_casts(dz.shape, UNREAD, again, BlockCast()))
        library.opcheck(torch.ops.mxstudy.activation_backward_cast_both, at)


@pytest.mark.parametrize("norm", [RowNorm(centers=True), RowNorm(p=2.0)])
@pytest.mark.parametrize("with_branch", [False, True])
def test_norm_cast_both_is_an_operator(norm, with_branch):
    """It has a schema and fake tensors, and is traced and compiled without a break."""
    x, gain, _ = (t.to(DEVICE) for t in norm_inputs())
    branch = x if with_branch else None
    known = pack(Normed(norm.p, norm.centers, norm.eps, False))
    casts = checked_casts(x.shape, "E4M3", None, BlockCast())
    library.opcheck(torch.ops.mxstudy.norm_cast_both, (x, branch, gain, None, known, casts))

    def cast(x, gain):
        return norm_cast_both(x, gain, norm, "E4M3", "E4M3", BlockCast(), branch=x if with_branch else None)

    for one, other in zip(torch.compile(cast, fullgraph=True)(x, gain), cast(x, gain), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_same_bits(one, other)


@pytest.mark.parametrize("fmt", ["E4M3", None])
@pytest.mark.parametrize("axis", [-2, -1])
def test_cast_one_is_an_operator(fmt, axis):
    """It has a schema and fake tensors, and is traced and compiled without a break."""
    x, gain, bias = (t.to(DEVICE) for t in norm_inputs())
    mean, rms = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True).sqrt()
    casts = checked_casts(x.shape, fmt if axis == -1 else None, fmt if axis == -2 else None, BlockCast())
    for of in ((None, None, None, None), (None, rms, gain, None), (mean, rms, gain, bias)):
        library.opcheck(torch.ops.mxstudy.cast_one, (x, *of, x, True, axis, casts))

    def cast(x):
        return cast_one(x, fmt, axis, BlockCast(), mean=mean, rms=rms, gain=gain, bias=bias)

    assert_same_bits(torch.compile(cast, fullgraph=True)(x), cast(x))


@pytest.mark.parametrize("with_rope", [False, True])
def test_heads_cast_both_is_an_operator(with_rope):
    """It has a schema and fake tensors, and is traced and compiled without a break."""
    dq, dk, dv = (torch.randn(2, 32, heads, 16).bfloat16().to(DEVICE) for heads in (4, 2, 2))
    rope = torch.randn(32, 8, device=DEVICE) if with_rope else None
    casts = checked_casts((64, 128), "E4M3", None, BlockCast())
    library.opcheck(torch.ops.mxstudy.heads_cast_both, (dq, dk, dv, rope, casts))

    def cast(dq, dk, dv):
        return heads_cast_both(dq, dk, dv, rope, "E4M3", UNREAD, BlockCast())

    for one, other in zip(torch.compile(cast, fullgraph=True)(dq, dk, dv), cast(dq, dk, dv), strict=True):
        assert_same_bits(one, other)


def test_rotate_heads_is_an_operator():
    qkv, rope = torch.randn(14, 64).bfloat16(), torch.randn(7, 8)
    library.opcheck(torch.ops.mxstudy.rotate_heads_, (qkv, rope, 48, 16))
    with pytest.raises(ConfigError, match="qkv: the kernel takes bfloat16"):
        rotate_heads_(qkv.float(), rope, 48, 16)
    with pytest.raises(ConfigError, match=r"qkv: \[14, 48\] with strides \(64, 1\) is not contiguous"):
        rotate_heads_(qkv[:, :48], rope, 48, 16)


def test_heads_of_bad_input():
    dq, dk = torch.ones(1, 32, 4, 16, dtype=BF16), torch.ones(1, 32, 1, 16, dtype=BF16)
    with pytest.raises(ConfigError, match=r"block_size: 32 does not divide the heads of dk, \[1, 32, 1, 16\]"):
        heads_cast_both(dq, dk, dk, None, "E4M3", None, BlockCast())
    with pytest.raises(ConfigError, match=r"dq: torch\.float32 is not what attention in bfloat16 gives"):
        heads_cast_both(dq.float(), dk, dk, None, None, None, BlockCast())


def test_a_bf16_tensor_without_a_format_is_its_own_operand():
    x = torch.ones(32, 32, dtype=BF16)
    assert cast_one(x, None, -2, BlockCast()) is x


def test_an_operand_that_nobody_reads_has_no_elements():
    x = torch.ones(48, 64)
    row, column = cast_both(x, "E4M3", UNREAD, BlockCast())  # blocks of it need not divide anything
    assert (row.shape, column.shape) == (x.shape, (0,))
    library.opcheck(torch.ops.mxstudy.cast_both, (x, checked_casts(x.shape, "E4M3", UNREAD, BlockCast())))


@pytest.mark.parametrize(("fmt", "scale"), [("E4M3", None), ("E2M1", None), ("NVFP4", 0.05)])
@pytest.mark.parametrize("norm", [RowNorm(), RowNorm(p=2.0)], ids=str)
def test_norm_codes_is_an_operator(norm, fmt, scale):
    """It has a schema and fake tensors, is traced and compiled without a break, and equals the numerics on CPU."""
    x = norm_inputs((2, 32, 96), BF16)[0].to(DEVICE)
    cast = BlockCast(16)
    packed = encoding(norm, fmt, cast)
    library.opcheck(torch.ops.mxstudy.norm_codes, (x, None, scale, packed))
    library.opcheck(torch.ops.mxstudy.norm_codes, (x, x / 3, scale, packed))
    added = norm_codes(x, norm, fmt, cast, scale, branch=x / 3)
    assert_same_bits(added.total, x + x / 3)
    assert_same_bits(added.codes, norm_codes(x + x / 3, norm, fmt, cast, scale).codes)
    found = norm_codes(x, norm, fmt, cast, scale)
    for one, other in zip(torch.compile(norm_codes, fullgraph=True)(x, norm, fmt, cast, scale), found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert (found.rms.cpu() / rms_of(x.cpu(), norm, 16)[1] - 1).abs().max() < 1e-6
    expected = block_cast(x.cpu().float() / found.rms.cpu(), fmt, -1, cast, scale)
    assert found.scales.dtype == expected.scales.dtype
    assert_same_bits(found.codes.cpu(), expected.codes)
    assert_same_bits(found.scales.view(torch.uint8).cpu(), expected.scales.view(torch.uint8))


ON_META = torch.ones(4, 64, dtype=BF16, device="meta")


@each(
    ("given", "message"),
    [
        ({"x": torch.ones(4, 64)}, r"x: the kernel takes bfloat16"),
        ({"norm": RowNorm(centers=True)}, "norm: no kernel that gives codes subtracts a mean"),
        ({"fmt": "E3M2"}, "format: E3M2 has no kernel that gives codes"),
        ({"cast": BlockCast(8)}, "block_size: 8 has no kernel"),
        ({"cast": BlockCast(64), "x": torch.ones(4, 96, dtype=BF16)}, "does not divide axis -1"),
        ({"x": torch.ones(1, 2**17, dtype=BF16)}, "rows of 131072 have no kernel"),
        ({"fmt": "NVFP4"}, "NVFP4 has blocks of 16"),
        ({"fmt": "NVFP4", "cast": BlockCast(16)}, "tensor_scale: NVFP4 needs one: give that of a bound"),
        ({"tensor_scale": 1.0}, "tensor_scale: E4M3 has none"),
        ({"branch": torch.ones(4, 64)}, "branch: it is added to x"),
        ({"cast": BlockCast(scale_rule="code_bump")}, "scale_rule: code_bump has no kernel"),
        ({"x": ON_META, "cast": BlockCast(rounding="up")}, "rounding: up has no kernel"),
        ({"x": ON_META, "cast": BlockCast(rounding="stochastic")}, "rounding: stochastic has no kernel"),
        ({"fmt": "NVFP4", "cast": BlockCast(16), "tensor_scale": 0.0}, r"tensor_scale: 0\.0; give a number that is"),
    ],
)
def test_norms_whose_codes_no_kernel_gives(given, message):
    usual = {"x": torch.ones(4, 64, dtype=BF16), "norm": RowNorm(), "fmt": "E4M3", "cast": BlockCast()}
    with pytest.raises(ConfigError, match=message):
        norm_codes(**usual | given)


@every_activation
@every_rounding_of_values
def test_on_cpu_activations_and_their_gradients_are_torchs(name, gate, dtype):
    h, dz = activation_inputs(name)
    leaf = h.clone().requires_grad_()
    z = COMPOSED[name](leaf, gate, dtype)
    (dh,) = torch.autograd.grad(z, leaf, dz.to(z.dtype))
    options = {"gate_dtype": gate, "dtype": dtype}
    operands = activation_cast_both(h, name, "E4M3", "E5M2", BlockCast(), **options)
    gradients = activation_backward_cast_both(dz, h, name, "E5M2", None, BlockCast(16), **options, again="E4M3")
    assert_same_bits(operands[0], quantize(z.detach(), "E4M3").dequantize(BF16))
    assert_same_bits(operands[1], quantize(z.detach(), "E5M2", axis=0).dequantize(BF16))
    assert_beside(gradients[1], dh, name, 1)
    assert_same_bits(gradients[0], quantize(gradients[1], "E5M2", 16).dequantize(BF16))
    assert_same_bits(gradients[2], quantize(z.detach(), "E4M3", 16, axis=0).dequantize(BF16))


@every_norm
def test_on_cpu_norms_are_the_numerics(norm):
    x, gain, bias = norm_inputs(dtype=BF16)
    got = norm_cast_both(x, gain, norm, "E4M3", "E5M2", BlockCast(), bias=bias, branch=x)
    assert torch.equal(got.total, x + x)
    _, rms = rms_of(x + x, norm, 32)
    assert (got.rms.cpu() / rms - 1).abs().max() < 1e-6
    assert (got.mean is None) == (not norm.centers)
    y = normalized(x + x, got.mean if norm.centers else torch.empty(0), got.rms, gain, bias)
    assert_same_bits(got.row, block_cast(y, "E4M3", -1, BlockCast()).dequantize(BF16))
    assert_same_bits(got.column, block_cast(y, "E5M2", -2, BlockCast()).dequantize(BF16))


@each(
    ("shape", "row", "column", "block_size", "message"),
    [
        ((64, 64), "NVFP4", None, 16, "NVFP4 has E4M3 scales"),
        ((64, 64), "E4M4", None, 32, "'E4M4' is not a choice"),
        ((64, 64), "E4M3", None, 8, "block_size: 8 has no kernel"),
        ((64, 48), "E4M3", None, 32, "does not divide axis -1"),
        ((48, 64), "E4M3", "E4M3", 32, "does not divide axis -2"),
    ],
)
def test_casts_that_no_kernel_does(shape, row, column, block_size, message):
    with pytest.raises(ConfigError, match=message):
        cast_both(torch.ones(shape), row, column, BlockCast(block_size))


@pytest.mark.parametrize("rounding", ["up", "stochastic"])
def test_another_rounding_is_refused_where_nothing_is_cast(rounding):
    """A kernel would treat it as ties to even."""
    with pytest.raises(ConfigError, match=f"rounding: {rounding} has no kernel; take one of"):
        cast_both(torch.ones(64, 64), None, None, BlockCast(rounding=rounding))


def test_activations_of_bad_input():
    h, dz = activation_inputs("swiglu")
    with pytest.raises(ConfigError, match="'swish' is not a choice"):
        activation_cast_both(h, "swish", None, None, BlockCast())
    with pytest.raises(ConfigError, match=r"h: the kernel takes bfloat16, not torch.float32"):
        activation_cast_both(h.float(), "swiglu", None, None, BlockCast())
    with pytest.raises(ConfigError, match="is no gradient of relu"):
        activation_backward_cast_both(dz, h, "relu", None, None, BlockCast())
    with pytest.raises(ConfigError, match="does not divide axis -1"):
        activation_cast_both(h[:, :96].contiguous(), "swiglu", "E4M3", None, BlockCast())


@each(
    ("options", "message"),
    [
        ({"gain": None, "bias": torch.ones(256)}, "bias: it is added after the gain"),
        ({"norm": RowNorm(p=1.0, centers=True)}, "give p or centers, not both"),
        ({"branch": torch.ones(3)}, "branch: it is added to x"),
        ({"row": None, "norm": RowNorm(p=1.0), "x": torch.ones(4, 48)}, "does not divide axis -1"),
        ({"x": torch.ones(48, 256), "column": "E4M3"}, "does not divide axis -2"),
    ],
)
def test_norms_of_bad_input(options, message):
    given = {"x": torch.ones(64, 256), "gain": torch.ones(256), "norm": RowNorm(), "row": "E4M3", "column": None}
    with pytest.raises(ConfigError, match=message):
        norm_cast_both(**given | options, cast=BlockCast())
