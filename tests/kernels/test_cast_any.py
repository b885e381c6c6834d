"""The kernel casts one operand by any recipe, with the bits of the same computed step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from any_recipe import (
    ALONE,
    BELOW_A_SCALE,
    DRAWS,
    ONE,
    every_axis,
    every_rounding,
    kernel,
    numbers,
    quantized,
)
from bits import assert_same_bits, every_rule
from blocks import every_kind
from fused import BF16, FP32, every_dtype, norm_inputs, normalized
from interpreter import every_format

from mxstudy.kernels.cast_any import absmax_any, cast_any
from mxstudy.kernels.operand_cast import KERNEL_BLOCKS, KERNEL_TRANSFORMS, Groups, OperandCast
from mxstudy.kernels.packing import pack, unpack
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.random_bits import Draws, random_signs
from mxstudy.numerics.transforms import hadamard
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration


@every_format
@every_axis
@every_dtype
@pytest.mark.parametrize("rounding", ["even", "away"])
def test_without_anything_new_it_is_the_block_cast(fmt, axis, dtype, rounding):
    x, cast = numbers(dtype=dtype), BlockCast(16, "even", rounding, operand_pre_round=True)
    got = kernel(x, OperandCast(fmt, axis, 16, scale_rule="even", rounding=rounding, pre_round=True))
    assert_same_bits(got, block_cast(x, fmt, axis, cast).dequantize(BF16))


@every_format
@every_rule
@every_axis
@every_rounding
def test_every_format_rule_and_rounding(fmt, rule, axis, rounding):
    kernel(numbers(), OperandCast(fmt, axis, scale_rule=rule, rounding=rounding))


@every_axis
@every_rounding
@pytest.mark.parametrize(
    ("fmt", "rule", "headroom"), [("E2M1", "floor", 3 / 4), ("E4M3", "rceil", 0.3), ("E2M1", "even", 16 / 17)]
)
def test_headroom_below_e8m0_scales(fmt, rule, headroom, axis, rounding):
    """Elements over their scales are multiplied by it; the result of the GEMM is divided by it."""
    x, cast = numbers(), OperandCast(fmt, axis, scale_rule=rule, rounding=rounding, headroom=headroom)
    assert_same_bits(kernel(x, cast), quantized(x, cast))


@every_axis
def test_headroom_after_a_transform(axis):
    """Cast as mxfp4_rht_sr does: tiles of 64 over two blocks of 32, scaled by 3/4 and rounded stochastically."""
    x, signs = numbers((64, 64), BF16), random_signs(DRAWS, 64)
    cast = OperandCast("E2M1", axis, 32, False, "floor", "stochastic", transform_size=64, headroom=0.75)
    y = hadamard(x, 64, signs, axis=axis)
    assert_same_bits(kernel(x, cast, signs=signs), quantized(y, replace(cast, transform_size=None)))


@pytest.mark.parametrize("fmt", ["E4M3", "E2M1"])
@every_axis
@pytest.mark.parametrize("rounding", ["even", "stochastic"])
@pytest.mark.parametrize("block_size", KERNEL_BLOCKS)
@pytest.mark.parametrize("square", [False, True])
def test_every_block(fmt, axis, rounding, block_size, square):
    kernel(numbers((128, 128)), OperandCast(fmt, axis, block_size, square, "floor", rounding))


@every_axis
@pytest.mark.parametrize("size", KERNEL_TRANSFORMS)
@pytest.mark.parametrize(("dtype", "signed", "after"), [(BF16, False, False), (FP32, True, False), (BF16, True, True)])
def test_every_transform(axis, size, dtype, signed, after):
    """A transform alone equals `hadamard`, and its result is cast like any tensor."""
    x, signs = numbers((128, 48) if axis == -2 else (48, 128), dtype), random_signs(DRAWS, size) if signed else None
    y = hadamard(x, size, signs, axis=axis, signs_after=after)
    alone = OperandCast(None, axis, transform_size=size, signs_after=after)
    assert_same_bits(kernel(x, alone, signs=signs), y)
    cast = replace(alone, fmt="E2M1", block_size=16, rounding="away")
    assert_same_bits(kernel(x, cast, signs=signs), cast_any(y, replace(cast, transform_size=None)))


@every_axis
@pytest.mark.parametrize("size", [16, 32, 128])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("rounding", ["even", "stochastic"])
def test_a_tile_of_the_transform_beside_any_block(axis, size, block_size, rounding):
    cast = OperandCast("E4M3", axis, block_size, rounding=rounding, transform_size=size)
    kernel(numbers((128, 32) if axis == -2 else (32, 128)), cast, signs=random_signs(DRAWS, size))


@every_axis
@pytest.mark.parametrize("centers", [False, True])
@pytest.mark.parametrize("affine", ["none", "gain", "gain and bias"])
@pytest.mark.parametrize(("size", "dtype"), [(None, BF16), (16, FP32), (32, BF16)])
def test_a_norms_output(axis, centers, affine, size, dtype):
    """The norm's output goes in FP32, unrounded, into the transform or into the cast."""
    x, gain, bias = norm_inputs((32, 64) if axis == -1 else (64, 32), dtype)
    mean = x.float().mean(-1, keepdim=True) if centers else None
    rms = x.float().square().mean(-1, keepdim=True).sqrt()
    gain = None if affine == "none" else gain.to(FP32 if affine == "gain" else BF16)  # FP32 where it is rounded
    bias = bias.to(BF16) if affine == "gain and bias" else None
    y = normalized(x, torch.empty(0) if mean is None else mean, rms, gain, bias)
    cast = OperandCast("E4M3", axis, rounding="stochastic", transform_size=size)
    got = kernel(x, cast, mean=mean, rms=rms, gain=gain, bias=bias)
    assert_same_bits(got, cast_any(y, cast, draws=DRAWS))


@every_axis
@every_dtype
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_weight_in_square_blocks(axis, dtype, folded, block_size):
    """The weight is rounded to bf16, and multiplied by a folded gain in FP32.

    Both axes have the same squares, so dgrad reads the forward's operand.
    """
    weight, gain, _ = norm_inputs((96, 64), dtype)
    gain = gain.to(BF16) if folded else None
    cast = OperandCast("E4M3", axis, block_size, square=True, round_first=True)
    y = weight.to(BF16).to(FP32)
    y = y * gain.to(FP32) if folded else y
    squares = y.unflatten(1, (-1, block_size)).unflatten(0, (-1, block_size)).transpose(1, 2).flatten(2)
    expected = block_cast(squares, "E4M3", -1, BlockCast(block_size**2)).dequantize(BF16)
    expected = expected.unflatten(2, (block_size, block_size)).transpose(1, 2).reshape(weight.shape)
    assert_same_bits(kernel(weight, cast, gain=gain), expected)


@pytest.mark.parametrize("rounding", ["even", "stochastic"])
@pytest.mark.parametrize(("shape", "axis"), [((37, 96), -1), ((1, 32), -1), ((64, 37), -2), ((96, 2), -2)])
@pytest.mark.parametrize("size", [None, 32])
def test_any_number_across_the_contraction_axis(shape, axis, rounding, size):
    x, _, _ = norm_inputs(shape)
    kernel(x, OperandCast("E4M3", axis, rounding=rounding, transform_size=size))


@every_axis
def test_strides(axis):
    x, _, _ = norm_inputs((64, 96))
    kernel(x.T, OperandCast("E4M3", axis, rounding="stochastic"))


@pytest.mark.parametrize(
    ("axis", "groups"), [(-1, Groups(32, 4)), (-1, Groups(64, 2, 8)), (-2, Groups(1, 64)), (-2, Groups(1, 128, 8))]
)
def test_no_bit_depends_on_the_tile(axis, groups):
    """Nor does a bit depend on which rows are in one launch, because a position is that of the global tensor."""
    x, cast = numbers((128, 128)), OperandCast("E2M1", axis, 16, rounding="stochastic", transform_size=16)
    whole = kernel(x, cast)
    assert_same_bits(kernel(x, cast, groups), whole)
    later = Draws(DRAWS.key, DRAWS.place + torch.tensor([0, 64]))
    assert_same_bits(cast_any(x[64:], cast, draws=later), whole[64:])


@every_format
@every_axis
@pytest.mark.parametrize("bits", [24, 8])
@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_regimes_of_numbers(fmt, axis, bits, rule):
    """NaN, infinities, zeros, subnormals and all other kinds of blocks are rounded with `bits` random bits."""
    blocks = torch.from_numpy(every_kind(fmt, 32, per_kind=8)).flatten()
    x = blocks[: len(blocks) // 64 * 64].view(-1, 64)
    x = x[: len(x) // 16 * 16]
    kernel(x if axis == -1 else x.T.contiguous(), OperandCast(fmt, axis, 32, False, rule, "stochastic", bits))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_tile(bad):
    x, _, _ = norm_inputs((64, 96))
    x[33, 5] = bad
    cast = OperandCast("E4M3", -2, 16, rounding="stochastic")
    for size, rows in ((None, range(32, 48)), (32, range(32, 64))):
        got = kernel(x, replace(cast, transform_size=size))
        assert got.isnan().nonzero().tolist() == [[row, 5] for row in rows]


def test_options_packed_are_themselves():
    cast = OperandCast(
        "E2M1", -2, 16, True, "floor", "stochastic", 8, True, True, 64, True, "E4M3", "tensor", "training", True, 0.5
    )
    cast = replace(cast, largest_scale=256.0, candidates=(1.0, 1.5), candidate_error="mae")
    assert unpack(OperandCast, pack(cast)) == cast
    with pytest.raises(ValueError, match="shorter"):  # a field was left out
        unpack(OperandCast, "[null, -1]")


def test_the_operator_has_no_inside():
    """It compiles without a break, and another step or row compiles nothing anew."""
    torch._dynamo.reset()
    x, cast = numbers(), OperandCast("E4M3", rounding="stochastic", transform_size=16)
    compiled = torch.compile(lambda x, draws: cast_any(x * 2, cast, draws=draws), fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        compiled(x, DRAWS)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for place in ([6, 0], [7, 64]):
            draws = Draws(DRAWS.key, torch.tensor(place))
            assert_same_bits(compiled(x, draws), cast_any(x * 2, cast, draws=draws))


def test_the_absmax_has_no_inside():
    torch._dynamo.reset()
    x, cast = numbers(), OperandCast("NVFP4", -1, 16, **BELOW_A_SCALE)
    compiled = torch.compile(lambda x: cast_any(x * 2, cast, outer=absmax_any(x * 2, cast)), fullgraph=True)
    assert_same_bits(compiled(x), quantized(x * 2, cast))


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, {"x": torch.ones(2, 64, 64)}, r"x: \[2, 64, 64\] of torch.float32 has no kernel"),
        ({}, {"x": torch.ones(64, 64).double()}, "x: .* of torch.float64 has no kernel"),
        ({}, {"bias": torch.ones(64)}, "bias: it is added after the gain"),
        ({}, {"signs": torch.ones(16)}, "signs: they belong to a transform; give its size"),
        ({"rounding": "stochastic"}, {"draws": None}, "draws: stochastic rounding needs them; give a key"),
        ({}, {"draws": Draws(DRAWS.key[None], DRAWS.place)}, "draws: a stack's key has no kernel"),
        ({}, {"draws": Draws(*DRAWS[:2], torch.arange(4))}, "draws: dispatched rows have no kernel"),
        ({"rounding": "nearest"}, {}, "rounding: 'nearest' has no kernel; take one of"),
        ({"rounding": "stochastic", "random_bits": 16}, {}, "random_bits: 16 has no kernel"),
        ({"fmt": "NVFP4"}, {}, "NVFP4 has E4M3 scales"),
        ({"scale_rule": "round"}, {}, "scale_rule: 'round' is not a choice"),
        ({"scale": "FP32"}, {}, "scale: FP32 scales are not multiplied into an operand; call cast_blocks"),
        ({"scale": "FP16"}, {}, "scale: 'FP16' is not a choice"),
        ({"scale": "FP32", "headroom": 0.5}, {}, "headroom: it has no kernel with scale=FP32"),
        ({"candidates": (1.0, 1.5)}, {}, "candidates: E8M0 scales have no kernel with several"),
        (ONE | {"outer_scale": "row", "block_size": 16}, {}, "outer_scale: 'row' is not a choice"),
        ({"pad": True}, {}, "pad: E8M0 scales have no kernel that pads; set it to false"),
        (
            {"scale": "E4M3", "chain": "training", "outer_scale": "tensor"},
            {},
            "outer: give it exactly if the cast has an outer",
        ),
        ({"outer_scale": "tensor"}, {}, "outer_scale: 'tensor' is not a choice"),
        (ALONE | {"outer_scale": "row"}, {}, "outer_scale: 'row' is not a choice"),
        ({"scale": "E4M3"}, {}, "chain: inference has no kernel for E4M3 scales; take training"),
        (ALONE, {"outer": torch.ones(())}, "outer: give it exactly if"),
        ({"block_size": 256}, {}, "block_size: 256 has no kernel"),
        ({"block_size": 64}, {"x": torch.ones(64, 96)}, "block_size: 64 does not divide axis -1"),
        ({"square": True}, {"x": torch.ones(48, 64)}, "block_size: 32 does not divide axis -2"),
        ({"fmt": None}, {"x": torch.ones(48, 40)}, r"axis -1 of shape \[48, 40\]: give a multiple of 16"),
        ({"axis": 1}, {}, "axis: 1 is not an operand's axis; take -1"),
        ({"transform_size": 24}, {}, "transform.size: 24 is not a choice"),
        ({"transform_size": 64}, {"x": torch.ones(48, 96)}, r"transform.size: 64 does not divide axis -1"),
        ({"transform_size": 256}, {"x": torch.ones(48, 256)}, "transform.size: 256 has no kernel"),
    ],
)
def test_bad_input(options, given, message):
    given = {"x": torch.ones(64, 64), "draws": DRAWS} | given
    with pytest.raises(ConfigError, match=message):
        cast_any(given.pop("x"), OperandCast(**{"fmt": "E4M3"} | options), **given)
