"""The kernel casts by E4M3 scales, one scale a tensor, or the better of two, with the bits of the same step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from any_recipe import (
    ALONE,
    BELOW_A_SCALE,
    DRAWS,
    FOUR_OVER_SIX,
    ONE,
    every_axis,
    kernel,
    numbers,
    quantized,
)
from bits import assert_same_bits
from fused import BF16, every_dtype, norm_inputs, normalized
from interpreter import DEVICE, every_format

from mxstudy.kernels.cast_any import launch_absmax
from mxstudy.kernels.operand_cast import KERNEL_ROUNDINGS, OperandCast
from mxstudy.kernels.packing import pack
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.random_bits import random_signs
from mxstudy.numerics.transforms import hadamard

pytestmark = pytest.mark.integration


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
