"""The kernel casts one operand by any recipe, with the bits of the same computed step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import assert_same_bits, every_rule
from blocks import every_kind
from fused import BF16, FP32, every_dtype, norm_inputs, normalized
from interpreter import DEVICE, every_format

from mxstudy.kernels.cast_any import absmax_any, cast_any, launch_absmax, launch_cuda
from mxstudy.kernels.operand_cast import KERNEL_BLOCKS, KERNEL_ROUNDINGS, KERNEL_TRANSFORMS, Groups, OperandCast
from mxstudy.kernels.packing import pack, unpack
from mxstudy.numerics.cast import BlockCast, block_cast, quantize_as
from mxstudy.numerics.random_bits import Draws, random_signs, stream_key
from mxstudy.numerics.transforms import hadamard
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
every_axis = pytest.mark.parametrize("axis", [-2, -1], ids=["columns", "rows"])
every_rounding = pytest.mark.parametrize("rounding", KERNEL_ROUNDINGS)
ALONE = {"scale": "E4M3", "chain": "training"}
BELOW_A_SCALE = ALONE | {"outer_scale": "tensor"}
FOUR_OVER_SIX = BELOW_A_SCALE | {"largest_scale": 256.0, "candidates": (1.0, 1.5)}
ONE = {"scale": "none", "outer_scale": "tensor"}  # for the whole tensor
DRAWS = Draws(torch.tensor(stream_key(3, "layer/dgrad_dh")), torch.tensor([5, 2**32 - 3]))


def kernel(x, cast, groups=None, **given):
    """Return the kernel's result as a CPU tensor, which must equal that of the operator away from GPUs."""
    of = dict.fromkeys(("mean", "rms", "gain", "bias", "signs")) | given
    key, place = DRAWS[:2] if cast.draws else (None, None)
    there = [None if t is None else t.to(DEVICE) for t in (*of.values(), key, place)]
    outer = launch_absmax(x.to(DEVICE), *there[:5], None, pack(cast)) if cast.has_outer else None
    absmax = absmax_any(x.contiguous(), cast, **given) if cast.has_outer else None
    if absmax is not None:
        assert_same_bits(outer.cpu(), absmax)
    got = launch_cuda(x.to(DEVICE), *there, outer, None, pack(cast), groups).cpu()
    assert_same_bits(got, cast_any(x.contiguous(), cast, **given, draws=DRAWS, outer=absmax))
    return got


def numbers(shape=(64, 64), dtype=FP32, seed=0):
    """Return numbers of many sizes, with a block of zeros and one of subnormals."""
    x, _, _ = norm_inputs(shape, dtype, seed)
    x[:16, :16] = 0
    x[16:32, :16] *= 2.0**-130
    return x


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


def quantized(x, cast):
    """Return x as the numerics quantise it, without the scale of the whole tensor."""
    found = quantize_as(x, cast.as_cast(), cast.axis, draws=DRAWS)
    return found.without_tensor_scale().dequantize(BF16)


@every_axis
@pytest.mark.parametrize("rounding", ["even", "stochastic"])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize(
    ("fmt", "block_size", "headroom"),
    [("NVFP4", 16, 1.0), ("E1M2", 16, 16 / 17), ("E4M3", 64, 1.0), ("E4M3", 128, 1.0)],
)
def test_e4m3_scales(fmt, block_size, headroom, outer, square, axis, rounding):
    x = numbers((256, 128))
    cast = OperandCast(
        fmt,
        axis,
        block_size,
        square,
        rounding=rounding,
        scale="E4M3",
        outer_scale="tensor" if outer else "none",
        chain="training",
        headroom=headroom,
    )
    assert_same_bits(kernel(x, cast), quantized(x, cast))


@every_format
@every_axis
@pytest.mark.parametrize("rounding", KERNEL_ROUNDINGS)
def test_one_scale_for_the_whole_tensor(fmt, axis, rounding):
    """Each element is divided by it, which rounds once."""
    x, cast = numbers((32, 64)), OperandCast(fmt, axis, 16, rounding=rounding, **ONE)
    assert_same_bits(kernel(x, cast), quantized(x, cast))


@pytest.mark.parametrize("largest", [0.0, 2.0**-149, 448 * 2.0**-126, 3.4e38, torch.inf, torch.nan])
def test_one_scale_at_the_ends_of_fp32(largest):
    x = torch.zeros(32, 32)
    x[16:] = numbers((16, 32)).clamp(-1, 1) * (min(largest, 1.0) if largest == largest else 1.0)
    x[3, 5] = largest
    cast = OperandCast("E4M3", -1, 16, **ONE)
    got = kernel(x, cast)
    assert_same_bits(got, quantized(x, cast))
    assert got.isnan().all() == (not largest < torch.inf)


@every_axis
def test_one_scale_needs_no_whole_groups(axis):
    """A tensor of any shape is cast, and a transform's output."""
    for shape in ((37, 50), (48, 64)):
        x, cast = numbers(shape, BF16), OperandCast("E5M2", axis, 16, **ONE)
        assert_same_bits(kernel(x, cast), quantized(x, cast))
    turned = replace(cast, transform_size=16)
    assert_same_bits(kernel(x, turned), quantized(hadamard(x, 16, axis=axis), cast))


@pytest.mark.parametrize("rounding", ["even", "stochastic"])
def test_e4m3_scales_that_are_subnormal_or_zero(rounding):
    """E4M3 scales from the largest down to 0 are those of the numerics.

    A block far below the others has the scale 0, and its elements become 0.
    """
    x = torch.randn(16, 512) * (2.0 ** -torch.arange(0, 32)).repeat_interleave(16)
    cast = OperandCast("NVFP4", -1, 16, rounding=rounding, **BELOW_A_SCALE)
    scales = quantize_as(x, cast.as_cast(), -1, draws=DRAWS).scales.float()
    assert scales.max() == 448
    assert ((scales > 0) & (scales < 2.0**-6)).any()
    assert (scales == 0).any()
    assert_same_bits(kernel(x, cast), quantized(x, cast))


@every_axis
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("rounding", ["even", "stochastic"])
def test_e4m3_scales_of_a_transforms_output(axis, size, rounding):
    """The absmax is that of the transformed tensor."""
    x, signs = numbers((128, 64), BF16), random_signs(DRAWS, size)
    cast = OperandCast(
        "NVFP4", axis, 16, rounding=rounding, transform_size=size, scale="E4M3", outer_scale="tensor", chain="training"
    )
    assert_same_bits(
        kernel(x, cast, signs=signs), quantized(hadamard(x, size, signs, axis=axis), replace(cast, transform_size=None))
    )


@every_axis
@pytest.mark.parametrize("pre_round", [False, True])
def test_e4m3_scales_of_a_norms_output_and_of_a_folded_weight(axis, pre_round):
    x, gain, _ = norm_inputs((37, 64) if axis == -1 else (64, 37))
    gain, rms = gain.to(BF16), x.float().square().mean(-1, keepdim=True).sqrt()
    cast = OperandCast("NVFP4", axis, 16, pre_round=pre_round, **BELOW_A_SCALE)
    y = normalized(x, torch.empty(0), rms, gain, None)
    assert_same_bits(kernel(x, cast, rms=rms, gain=gain), quantized(y, cast))
    cast = replace(cast, round_first=True)
    assert_same_bits(kernel(x, cast, gain=gain), quantized(x.to(BF16).float() * gain.float(), cast))


@every_dtype
@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
def test_the_absmax_of_a_norms_output_is_one_number_for_every_cast(dtype, bad):
    """It does not depend on axis, blocks, elements or rounding, so two casts of one tensor may share it."""
    x, gain, bias = norm_inputs((64, 128), dtype)
    x[37, 5] = x[37, 5] if bad is None else bad
    rms = torch.full((64, 1), 1.7)
    given = {"rms": rms.to(DEVICE), "gain": gain.to(BF16).to(DEVICE), "bias": bias.to(BF16).to(DEVICE)}
    casts = [
        OperandCast(fmt, axis, size, square, rounding=rounding, **BELOW_A_SCALE)
        for fmt, size in (("NVFP4", 16), ("E4M3", 64))
        for axis in (-2, -1)
        for square in (False, True)
        for rounding in ("even", "stochastic")
    ]
    casts += [OperandCast("E5M2", axis, 16, **ONE) for axis in (-2, -1)]
    expected = normalized(x, torch.empty(0), rms, gain.to(BF16), bias.to(BF16)).abs().amax()
    for cast in casts:
        of = dict.fromkeys(("mean", "rms", "gain", "bias", "signs")) | given
        assert_same_bits(launch_absmax(x.to(DEVICE), *of.values(), None, pack(cast)).cpu(), expected)


@pytest.mark.parametrize("largest", [0.0, 2.0**-149, 2.0**-126, 1e-36, 3.4e38, torch.inf, torch.nan])
def test_e4m3_scales_at_the_ends_of_fp32(largest):
    """One element sets the tensor's scale. Others are far below it, or as large, or zeros."""
    x = torch.zeros(32, 32)
    x[16:] = numbers((16, 32)) * min(largest, 1.0) if largest == largest else 1.0
    x[3, 5] = largest
    for outer in (False, True):
        cast = OperandCast("NVFP4", -1, 16, **(BELOW_A_SCALE if outer else ALONE))
        got = kernel(x, cast)
        assert_same_bits(got, quantized(x, cast))
        assert got.isnan().any() == (not largest < torch.inf)


@every_axis
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("error", ["mse", "mae"])
@pytest.mark.parametrize(("fmt", "block_size"), [("NVFP4", 16), ("E2M1", 64)])
def test_each_block_takes_the_scale_with_the_smaller_error(fmt, block_size, error, square, axis):
    """Four over six: both win somewhere; the second, where all but the largest are 5 to its 6."""
    x = numbers((128, 64))
    x[64:] = x[64:].sign() * 5 / 6
    x[64::16, ::16] = 1
    cast = OperandCast(fmt, axis, block_size, square, candidate_error=error, **FOUR_OVER_SIX)
    got = kernel(x, cast)
    assert_same_bits(got, quantized(x, cast))
    for one in cast.candidates:
        assert (got != quantized(x, replace(cast, candidates=(one,), candidate_error="mse"))).any()


@every_axis
@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "stochastic"},
        {"pre_round": True, "rounding": "away"},
        {"candidates": (1.5, 1.0, 1.25)},
        {"headroom": 16 / 17},
        {"outer_scale": "none", "largest_scale": 448.0},
    ],
    ids=str,
)
def test_a_choice_of_scales_beside_everything_else(options, axis):
    x = numbers((32, 64))
    for square in (False, True):
        cast = OperandCast("NVFP4", axis, 16, square, **FOUR_OVER_SIX | options)
        assert_same_bits(kernel(x, cast), quantized(x, cast))


@every_axis
@pytest.mark.parametrize("square", [False, True])
def test_a_choice_of_scales_after_a_transform_and_a_weights_gain(axis, square):
    x, gain, _ = norm_inputs((64, 64))
    gain, signs = gain.to(BF16), random_signs(DRAWS, 16)
    y = hadamard(x.to(BF16).float() * gain.float(), 16, signs, axis=axis)
    cast = OperandCast("NVFP4", axis, 16, square, round_first=True, transform_size=16, **FOUR_OVER_SIX)
    assert_same_bits(kernel(x, cast, gain=gain, signs=signs), quantized(y, replace(cast, transform_size=None)))


@pytest.mark.parametrize("largest", [0.0, 2.0**-149, 2.0**-126, 1e-36, 3.4e38, torch.inf, torch.nan])
@pytest.mark.parametrize("outer", ["none", "tensor"])
def test_a_choice_of_scales_at_the_ends_of_fp32(largest, outer):
    """A candidate's range may overflow, whose error is then NaN; and errors that are equal leave the first."""
    x = torch.zeros(32, 32)
    x[16:] = numbers((16, 32)) * min(largest, 1.0) if largest == largest else 1.0
    x[3, 5] = largest
    chosen = FOUR_OVER_SIX | ({"outer_scale": "none", "largest_scale": 448.0} if outer == "none" else {})
    for candidates in ((1.0, 1.5), (1.5, 1.0)):
        cast = OperandCast("NVFP4", -1, 16, **chosen | {"candidates": candidates})
        assert_same_bits(kernel(x, cast), quantized(x, cast))


def takes_second(x, cast):
    """Return whether the first block of every 16 columns takes the second of two scales."""
    found, first = (quantize_as(x, c.as_cast(), cast.axis) for c in (cast, replace(cast, candidates=(1.0,))))
    blocks = (found.scales.float() != first.scales.float())[0]
    return blocks if cast.square or cast.axis == -1 else blocks[::16]


@every_axis
@pytest.mark.parametrize("square", [False, True])
def test_a_choice_between_errors_that_are_almost_equal(square, axis):
    """Between two tensors, 16 columns at a time, lie two neighbours where the choice changes: every rounding counts."""
    cast = OperandCast("NVFP4", axis, 16, square, **FOUR_OVER_SIX)
    ends = torch.randn(2, 16, 1024, generator=torch.Generator().manual_seed(0))
    ends[1] = 2.5 * ends[1].sign()
    ends[1, 0, ::16] = 3
    ends[:, 15, 15] = 7.1  # the absmax, of which the inverse of 6 x 256 in FP32 makes another scale

    def between(shares):
        return ends[0] + shares.repeat_interleave(16) * (ends[1] - ends[0])

    low, high = torch.zeros(64), torch.ones(64)
    at_low, at_high = (takes_second(between(share), cast) for share in (low, high))
    assert (at_low != at_high).sum() > 16
    for _ in range(30):
        middle = (low + high) / 2
        is_low = takes_second(between(middle), cast) == at_low
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    for x in (between(low), between(high)):
        assert_same_bits(kernel(x, cast), quantized(x, cast))


def test_a_headroom_so_small_that_nothing_is_left_of_the_scale():
    x = numbers((16, 32))
    x[3, 5] = 3.4e38
    cast = OperandCast("NVFP4", -1, 16, headroom=2.0**-40, **BELOW_A_SCALE)
    assert_same_bits(kernel(x, cast), quantized(x, cast))


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
            "outer: the absmax of x belongs to a cast with an",
        ),
        ({"outer_scale": "tensor"}, {}, "outer_scale: 'tensor' is not a choice"),
        (ALONE | {"outer_scale": "row"}, {}, "outer_scale: 'row' is not a choice"),
        ({"scale": "E4M3"}, {}, "chain: inference has no kernel for E4M3 scales; take training"),
        (ALONE, {"outer": torch.ones(())}, "outer: the absmax of x belongs to"),
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
