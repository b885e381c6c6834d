"""What the kernel counts is what the measures of `numerics.quality` say of the quantised operand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fused import BF16, FP32, every_dtype, norm_inputs
from interpreter import DEVICE, every_format

from mxstudy.blocks.plans import settings_of
from mxstudy.config import BlockCast, Cast
from mxstudy.kernels.cast_counts import cast_counts, qualities
from mxstudy.numerics.gemms import quantized_operand
from mxstudy.probes.saturation import quality, scale_exponents
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
every_axis = pytest.mark.parametrize("axis", [-2, -1], ids=["columns", "rows"])


def assert_counted(x: torch.Tensor, cast: Cast, axis: int) -> None:
    """Compare the kernel with the measures of the quantised operand; counts must be equal."""
    [got] = qualities([cast_counts(x.to(DEVICE), cast.format, axis, settings_of(cast))])
    quantized = quantized_operand(x, cast, axis)
    expected = {
        name: value.item() for name, value in (quality(quantized, x, cast) | scale_exponents(quantized)).items()
    }
    assert got == pytest.approx(expected, rel=1e-12, abs=0, nan_ok=True)


@every_format
@every_axis
@every_dtype
@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
def test_it_counts_what_the_measures_say(fmt, axis, dtype, rule):
    x, _, _ = norm_inputs(dtype=dtype)
    x[:32, 32:64] = 0  # blocks of zeros in both directions
    assert_counted(x, Cast(format=fmt).filled(BlockCast(scale_rule=rule)), axis)


@every_axis
@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_of_other_sizes_and_other_roundings(axis, block_size):
    x, _, _ = norm_inputs((192, 320), BF16)
    assert_counted(x, Cast(format="E2M1").filled(BlockCast(block_size, "ceil", "away")), axis)


@every_axis
def test_what_is_rounded_to_bf16_first_is_compared_with_what_was_given(axis):
    x, _, _ = norm_inputs()
    x[0, 0], x[0, 1] = 1.76, -1.751
    cast = replace(Cast(format="E4M3").filled(BlockCast(scale_rule="floor")), pre_round=True)
    assert_counted(x, cast, axis)


def test_gradients_far_below_the_range_of_their_squares():
    x, _, _ = norm_inputs()
    cast = Cast(format="E5M2").filled(BlockCast())
    assert_counted(x * 2.0**-90, cast, -1)
    assert_counted(x * 2.0**110, cast, -2)


@every_axis
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_blocks_that_are_not_finite(axis, bad):
    x, _, _ = norm_inputs()
    x[3, 5] = bad
    cast = Cast(format="E4M3").filled(BlockCast(scale_rule="floor"))
    assert_counted(x, cast, axis)
    assert_counted(torch.full((32, 32), bad), cast, axis)


def test_nothing_but_zeros():
    x, cast = torch.zeros(32, 64, dtype=FP32), Cast(format="E4M3").filled(BlockCast())
    assert_counted(x, cast, -1)
    [got] = qualities([cast_counts(x.to(DEVICE), "E4M3", -1, BlockCast())])
    assert (got["scale_exponent_min"], got["scale_exponent_max"]) == (math.inf, -math.inf)


def test_experts_and_many_operands_at_once():
    stack, _, _ = norm_inputs((2, 64, 96), BF16)
    one, other = (cast_counts(x.to(DEVICE), "E4M3", -2, BlockCast()) for x in (stack, stack[0]))
    both, first = qualities([one, other])
    cast = Cast(format="E4M3").filled(BlockCast())
    assert both["underflow_fraction"] == quality(quantized_operand(stack, cast, -2), stack, cast)["underflow_fraction"]
    assert first["sqnr_db"] != both["sqnr_db"]
    assert qualities([]) == []


def test_bad_input():
    with pytest.raises(ConfigError, match="does not divide axis -2"):
        cast_counts(torch.ones(48, 64), "E4M3", -2, BlockCast())
