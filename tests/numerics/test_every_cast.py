"""Every field of a cast, at every value, has the bits of reference_casts.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from bits import assert_same_bits, every_format
from blocks import KINDS, every_kind, gaussian
from cast_checks import PLACE, TENSORS, assert_cast, assert_operand, assert_outcome, cast, drawn, every_axis, numbers
from each import each
from reference import ELEMENTS, SCALE_RULES
from reference_casts import cast_array

from mxstudy.config.casts import Cast
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.gemms import quantized_operand
from mxstudy.reader import ConfigError

every_rule = each("rule", SCALE_RULES)
every_headroom = each("headroom", [1.0, 3 / 4, 16 / 17])
every_rounding = each(("rounding", "bits"), [("even", 24), ("away", 24), ("stochastic", 24), ("stochastic", 8)])
every_square = each("square", [False, True], ids=["1xB", "BxB"])


# ---------------------------------------------------------------------------------------------------------- E8M0 scales


@every_format
@every_rule
@every_rounding
def test_powers_of_two(fmt: str, rule: str, rounding: str, bits: int) -> None:
    assert_cast(every_kind(fmt, 32, 1), cast(fmt, scale_rule=rule, rounding=rounding, random_bits=bits))


@every_axis
@every_rule
@each("size", [16, 32, 64])
def test_blocks_along_either_axis(size: int, rule: str, axis: int) -> None:
    assert_cast(numbers(size), cast(block_size=size, scale_rule=rule, rounding="stochastic"), axis)


@every_rule
@each("headroom", [3 / 4, 16 / 17])
@every_rounding
def test_headroom_below_a_power_of_two(rule: str, headroom: float, rounding: str, bits: int) -> None:
    """Elements are smaller by the headroom, decoding multiplies by its inverse, and the scale's code stays."""
    settings = {"scale_rule": rule, "rounding": rounding, "random_bits": bits}
    got, plain = (assert_cast(numbers(32), cast(headroom=h, **settings)) for h in (headroom, 1.0))
    assert torch.equal(got.scales, plain.scales)


def test_three_quarters_saturate_nowhere() -> None:
    clipped = {h: (~assert_cast(numbers(32, ["gaussian"], 64), floor(headroom=h)).inside).sum() for h in (1.0, 0.75)}
    assert clipped[1.0] > 0
    assert clipped[0.75] == 0


def floor(fmt: str = "E2M1", **values: Any) -> Cast:
    return cast(fmt, scale_rule="floor", **values)


# -------------------------------------------------------------------------------------------------------- square blocks

SQUARES = {
    "E8M0": {},
    "E8M0 of a deviation": {"statistic": "std", "scale_rule": "floor"},
    "E8M0, better of two": {"candidates": (1.0, 1.5)},
    "E4M3": {"scale": "E4M3"},
    "E4M3, better of two": {"scale": "E4M3", "candidates": (1.0, 1.5), "outer_scale": "tensor"},
    "FP32": {"scale": "FP32"},
    "FP32 with headroom": {"scale": "FP32", "headroom": 16 / 17},
}


@pytest.mark.integration
@each("size", [16, 32, 64])
@each("name", SQUARES)
def test_square_blocks_have_the_same_codes_along_both_axes(name: str, size: int) -> None:
    kinds = TENSORS if "outer_scale" in SQUARES[name] else [*KINDS] if size == 16 else ["gaussian", "with_nan_or_inf"]
    x = numbers(size, kinds, rows=size, blocks=1)
    square = cast(block_size=size, two_dimensional=True, rounding="stochastic", **SQUARES[name])
    got = assert_cast(x, square)
    draws = drawn(PLACE)
    other = quantize_as(torch.tensor(x), square, -2, None, draws)
    assert torch.equal(other.scales.float(), got.scales.float()) or got.scales.float().isnan().any()
    assert_same_bits(other.values, got.values)
    assert_same_bits(other.dequantize(), got.dequantize())


@each("shape", [(16, 16), (7, 33), (40, 16), (1, 1), (17, 50)])
@each("name", SQUARES)
def test_square_blocks_are_filled_up_with_zeros(name: str, shape: tuple[int, int]) -> None:
    square = cast(block_size=16, two_dimensional=True, pad=True, **SQUARES[name])
    got = assert_cast(gaussian(np.random.default_rng(2), shape), square)
    assert got.scales.shape == (-(-shape[0] // 16), -(-shape[1] // 16))


@every_axis
@each("size", [1, 33, 70])
@each("name", SQUARES)
def test_rows_are_filled_up_with_zeros(name: str, size: int, axis: int) -> None:
    assert_cast(gaussian(np.random.default_rng(3), (3, size)), cast(pad=True, **SQUARES[name]), axis)


# ------------------------------------------------------------------------------------------------- E4M3 and FP32 scales


@pytest.mark.integration
@every_headroom
@every_axis
@each("outer", ["none", "tensor", "row", "bound"])
@each("size", [16, 32, 64])
def test_e4m3_scales(size: int, outer: str, axis: int, headroom: float) -> None:
    x = numbers(size, TENSORS if outer == "tensor" else KINDS, blocks=2 if outer == "row" else 1)
    e4m3 = cast(block_size=size, scale="E4M3", outer_scale=outer, headroom=headroom)
    for bound in (None, 2.0**7, 2.0**-9 * 1.75) if outer == "bound" else (None,):
        assert_operand(x, e4m3, axis, bound)


@every_format
@every_rounding
@each("scale", ["E4M3", "FP32"])
def test_every_format_with_scales_of_its_own(fmt: str, scale: str, rounding: str, bits: int) -> None:
    assert_cast(numbers(32), cast(fmt, scale=scale, rounding=rounding, random_bits=bits, headroom=16 / 17))


def training(**values: Any) -> Cast:
    return cast(**{"scale": "E4M3", "block_size": 16, "chain": "training", "outer_scale": "tensor"} | values)


def wide(binades: float, rows: int = 16) -> np.ndarray:
    """Return rows of 4 blocks whose sizes span so many binades that many block scales are subnormal or 0."""
    rng = np.random.default_rng(16)
    sizes = np.exp2(rng.uniform(-binades, 0, (rows, 4))).repeat(16, 1)
    return (rng.standard_normal((rows, 64)) * sizes).astype(np.float32)


@every_headroom
@every_axis
@each("outer", ["none", "tensor", "row", "bound"])
def test_the_training_chain(outer: str, axis: int, headroom: float) -> None:
    x = numbers(16, TENSORS if outer == "tensor" else KINDS, blocks=2)
    for bound in (None, 2.0**7, 0.0) if outer == "bound" else (None,):
        assert_operand(x, training(outer_scale=outer, headroom=headroom), axis, bound)
    assert_operand(wide(16), training(outer_scale=outer, headroom=headroom), axis)


@each(
    "values",
    [
        {"two_dimensional": True},
        {"rounding": "stochastic", "headroom": 16 / 17},
        {"rounding": "away", "block_size": 32},
        {"format": "E4M3"},
        {"candidates": (1.0, 1.5), "largest_scale": 256.0},
        {"candidates": (1.0, 1.5), "largest_scale": 256.0, "two_dimensional": True},
    ],
    ids=str,
)
def test_the_training_chain_with_all_else(values: dict[str, Any]) -> None:
    fmt = {"fmt": values.pop("format")} if "format" in values else {}
    assert_cast(wide(20), training(**fmt, **values))


def test_the_two_chains_differ_in_small_scales_and_in_ties() -> None:
    """Small scales are subnormal or 0 in the training chain. Above 2^-6 the order changes only a few of them."""
    x = torch.tensor(wide(20, 4096)).bfloat16()
    one, other = (
        quantized_operand(x, training(chain=chain, outer_scale="row"), -1).scales.float()
        for chain in ("training", "inference")
    )
    small = other == 2.0**-6
    assert (one[small] < 2.0**-6).double().mean() > 0.5
    assert (one[small] == 0).any()
    assert 0 < (one[~small] != other[~small]).double().mean() < 0.01


def test_a_tensor_of_zeros_and_one_that_is_not_finite() -> None:
    assert not assert_cast(np.zeros((2, 32)), training()).dequantize().any()
    for bad in (np.nan, np.inf):
        x = gaussian(np.random.default_rng(0), (2, 32))
        x[0, 3] = bad
        assert assert_cast(x, training()).dequantize().isnan().all()
        assert assert_cast(x, training(outer_scale="none")).dequantize().isnan().sum() == 16


@each("largest", [256.0, 448.0])
def test_the_largest_block_scale(largest: float) -> None:
    for chain in ("inference", "training"):
        got = assert_cast(numbers(16, ["gaussian"], 8), training(chain=chain, largest_scale=largest))
        assert got.scales.float().max() == largest


@each(
    ("values", "message"),
    [
        ({"chain": "training"}, "chain: is for E4M3 scales"),
        ({"largest_scale": 256.0, "scale": "E4M3"}, "largest_scale: is for E4M3 scales"),
        ({"largest_scale": 512.0, "scale": "E4M3", "outer_scale": "tensor"}, "largest_scale: must be above 0"),
    ],
)
def test_what_a_chain_cannot_be_of(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cast(format="E2M1", **values)


@each("rounding", ["even", "away", "stochastic"])
@every_headroom
def test_nvfp4_is_the_same_written_out(rounding: str, headroom: float) -> None:
    settings = {"block_size": 16, "scale": "E4M3", "outer_scale": "tensor", "rounding": rounding, "headroom": headroom}
    x = numbers(16, TENSORS)
    one, other = (assert_cast(x, cast(fmt, **settings)) for fmt in ("NVFP4", "E2M1"))
    assert_same_bits(one.values, other.values)


@every_headroom
@every_axis
@every_square
@each("fmt", ["E4M3", "E2M1"])
def test_fp32_scales(fmt: str, square: bool, axis: int, headroom: float) -> None:
    """These are DeepSeek's 1 x 128 and 128 x 128, in smaller blocks. Every block's largest element is the format's."""
    x = numbers(16, KINDS, 16, 1) if square else numbers(64)
    got = assert_cast(x, cast(fmt, scale="FP32", block_size=16, two_dimensional=square, headroom=headroom), axis)
    if headroom == 1:
        assert got.values.nan_to_num().abs().max() == ELEMENTS[fmt].max


@every_headroom
@every_axis
@each("outer", ["tensor", "row", "bound"])
@each("fmt", ["E4M3", "E5M2"])
def test_one_scale_alone(fmt: str, outer: str, axis: int, headroom: float) -> None:
    x = numbers(32, TENSORS if outer == "tensor" else KINDS)
    for rounding in ("even", "stochastic"):
        alone = cast(fmt, scale="none", outer_scale=outer, headroom=headroom, rounding=rounding)
        assert_operand(x, alone, axis, 2.0**7 if outer == "bound" else None)


def test_headroom_keeps_a_scale_that_was_rounded_down_within_the_range() -> None:
    """Headroom keeps the largest element within the range, even if E4M3 rounds the scale down by 1 / 17.

    Without it the largest would be 6 * 17 / 16 scales, which 16 / 17 makes 6.
    """
    x = numbers(16, ["gaussian"], 200)
    nvfp4 = [cast(block_size=16, scale="E4M3", outer_scale="tensor", headroom=h) for h in (1.0, 16 / 17)]
    without, beside = ((~assert_cast(x, one).inside).sum() for one in nvfp4)
    assert without > 0
    assert beside == 0


# ------------------------------------------------------------------------------- the standard deviation, and candidates


@every_format
@each("scale", [{"scale_rule": "floor"}, {"scale": "E4M3"}, {"scale": "FP32"}])
def test_the_standard_deviation(fmt: str, scale: dict[str, str]) -> None:
    assert_cast(numbers(32), cast(fmt, statistic="std", **scale), -1 if "scale" in scale else -2)


@each("size", [16, 32, 64])
def test_quartets_scale(size: int) -> None:
    """The scale is 2^floor(log2((2.92247856 / 6) * std + 1e-8)), with the deviation in float64.

    No block here is near a power of two.
    """
    x = numbers(size, ["gaussian"], 100)
    got = assert_cast(x, floor(statistic="std", block_size=size))
    std = x.astype(np.float64).reshape(100, -1, size).std(-1)
    want = np.floor(np.log2(2.92247856 / 6 * std + 1e-8))
    assert_same_bits(got.scales, want + 127)
    assert torch.equal(got.inside, torch.tensor(np.abs(x) <= 6 * np.exp2(want).repeat(size, -1)))


def test_what_has_no_deviation_is_nan() -> None:
    """The inputs are a NaN, an infinity, and numbers whose sum of squares overflows float32."""
    x = np.tile(gaussian(np.random.default_rng(0), (5, 32)), (1, 2))
    x[0, 3], x[1, 4], x[2, 5], x[3, 6], x[4, :2] = np.nan, np.inf, -np.inf, 2e19, (-np.inf, np.inf)
    for scale in ({"scale_rule": "floor"}, {"scale": "FP32"}, {"scale": "E4M3"}):
        got = assert_cast(x, cast(statistic="std", **scale)).dequantize().isnan()
        assert got[:, :32].all()
        assert not got[:, 32:].any()


CANDIDATES = [(1.0, 1.5), (1.5, 1.0), (1.0, 1.5, 0.75)]


@pytest.mark.integration
@every_square
@each("error", ["mse", "mae"])
@each("candidates", CANDIDATES, ids=str)
@each("scale", ["E8M0", "E4M3", "FP32"])
def test_candidates(scale: str, candidates: tuple[float, ...], error: str, square: bool) -> None:
    """The error of a square block is that of all its numbers."""
    x = numbers(16, KINDS, 16 if square else 4)
    settings = {"block_size": 16, "two_dimensional": square, "scale": scale}
    assert_cast(x, cast(candidates=candidates, candidate_error=error, **settings), -1 if error == "mse" else -2)


@every_square
@each("error", ["mse", "mae"])
def test_some_blocks_take_each_candidate(error: str, square: bool) -> None:
    x = numbers(16, ["gaussian"], 256)
    settings = {"block_size": 16, "two_dimensional": square, "scale": "FP32"}
    both = assert_cast(x, cast(candidates=(1.0, 0.9), candidate_error=error, **settings)).scales
    takes = [both == assert_cast(x, cast(candidates=(factor,), **settings)).scales for factor in (1.0, 0.9)]
    assert (takes[0] ^ takes[1]).all()
    assert min(one.sum() for one in takes) > 0


def test_a_candidate_whose_range_overflows_is_not_taken() -> None:
    """1.5 times the largest float32 is infinite."""
    for candidates in ((1.0, 1.5), (1.5, 1.0)):
        assert (
            assert_cast(np.full((1, 16), 3e38), cast(block_size=16, scale="FP32", candidates=candidates)).scales < 1e38
        )
    with pytest.raises(ConfigError, match="candidates: cannot be used with code_bump"):
        assert_cast(numbers(32), cast("E4M3", scale_rule="code_bump", candidates=(1.0, 1.5)))


def test_a_candidate_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"candidates: \[1.0, 1.5, 1.0\] has a factor twice"):
        cast(candidates=(1.0, 1.5, 1.0))


def test_the_first_of_equal_candidates_is_kept() -> None:
    """Zeros have no error, and 4 with a largest 4 has none by either scale: 4 = 4 * 1 = 6 * (4 / 6), exactly."""
    x = np.zeros((2, 16), np.float32)
    x[1, :2] = 3.0, -6.0
    for candidates in ((1.0, 2.0), (2.0, 1.0)):
        got = assert_cast(x, cast(block_size=16, scale="FP32", candidates=candidates))
        assert got.scales[1, 0] == candidates[0]


@pytest.mark.parametrize("rounding", ["away", "stochastic"])
def test_candidates_are_judged_as_they_are_rounded(rounding: str) -> None:
    for extra in ({}, {"headroom": 16 / 17}, {"outer_scale": "row"}, {"outer_scale": "tensor", "pre_round": True}):
        settings = {"block_size": 16, "scale": "E4M3", "candidates": (1.0, 1.5), "rounding": rounding, **extra}
        assert_operand(numbers(16, TENSORS, 8), cast(**settings))


# --------------------------------------------------------------------------------------------------------- what is left


@each("rounding", ["even", "stochastic"])
@each("name", SQUARES)
def test_pre_rounding(name: str, rounding: str) -> None:
    x = numbers(16, TENSORS) * np.float32(1 + 2.0**-9)
    assert_cast(x, cast(pre_round=True, block_size=16, rounding=rounding, **SQUARES[name]))


def test_other_dtypes_are_cast_from_float32() -> None:
    x = torch.tensor(numbers(32, TENSORS)).bfloat16()
    for one in (cast(), cast(scale="E4M3"), cast(scale="FP32", headroom=0.75)):
        assert_outcome(quantize_as(x, one, -1), cast_array(x.float().numpy(), one, -1))


def test_negative_zeros_and_subnormals_keep_their_sign() -> None:
    x = np.full((3, 32), -0.0, np.float32)
    x[1, ::2], x[2, 1::2] = -(2.0**-149), 2.0**-130
    for scale in ({}, {"scale": "E4M3"}, {"scale": "FP32"}, {"scale": "none", "outer_scale": "tensor"}):
        for rounding in ("even", "away", "stochastic"):
            got = assert_cast(x, cast(rounding=rounding, **scale))
            assert (got.values.signbit() == torch.tensor(x).signbit()).all()
