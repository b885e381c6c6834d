"""Measures of a cast agree with numpy in float64, and with what was measured elsewhere on Gaussian tensors."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from each import each
from reference import dequantize_array, quantize_array

from mxstudy.config.casts import Cast
from mxstudy.numerics import BlockCast, Quantized, quantize
from mxstudy.numerics.cast import block_cast, quantize_as
from mxstudy.numerics.quality import (
    max_fraction,
    overflow_fraction,
    pearson_squared,
    quantisation_gain,
    r_squared,
    sqnr_db,
    subnormal_scale_fraction,
    underflow_fraction,
)

DTYPES = [torch.float32, torch.bfloat16]
Pair = tuple[torch.Tensor, torch.Tensor]


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=DTYPES, ids=str)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Return a tensor with an offset, and another that resembles it."""
    x = gaussian(3, 5, 64) + 0.5
    return (1.1 * x + 0.3 * gaussian(3, 5, 64, seed=1)).to(request.param), x.to(request.param)


def arrays(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    got, want = (t.double().numpy().ravel() for t in pair)
    return got, want


def test_every_measure_is_a_tensor_without_dimensions_and_leaves_its_arguments_alone(pair: Pair) -> None:
    before = [t.clone() for t in pair]
    quantized = quantize(pair[1], "E4M3")
    measures = [measure(*pair) for measure in (r_squared, pearson_squared, quantisation_gain, sqnr_db)]
    measures += [overflow_fraction(quantized, pair[1]), max_fraction(quantized), underflow_fraction(quantized, pair[1])]
    assert [measure.shape for measure in measures] == [()] * 7
    assert all(torch.equal(now, then) for now, then in zip(pair, before, strict=True))


# ------------------------------------------------------------------------------------------ how alike two tensors are


def test_r_squared_is_the_explained_share_of_the_variance(pair: Pair) -> None:
    got, want = arrays(pair)
    residual = np.var(want - got) + np.mean(want - got) ** 2
    assert r_squared(*pair).item() == pytest.approx(1 - residual / np.var(want), rel=1e-12)


def test_pearson_squared_is_that_of_numpy(pair: Pair) -> None:
    assert pearson_squared(*pair).item() == pytest.approx(np.corrcoef(*arrays(pair))[0, 1] ** 2, rel=1e-12)


def test_a_wrong_factor_lowers_r_squared_alone(pair: Pair) -> None:
    x = pair[1].float()
    assert pearson_squared(3 * x + 1, x).item() == pytest.approx(1, abs=1e-12)
    assert r_squared(x, x).item() == 1
    assert r_squared(torch.full_like(x, x.double().mean().item()), x).item() == pytest.approx(0, abs=1e-9)
    assert r_squared(-x, x) < 0


def test_gain_is_the_slope_of_least_squares_through_zero(pair: Pair) -> None:
    got, want = arrays(pair)
    slope = np.linalg.lstsq(want[:, None], got, rcond=None)[0][0]
    assert quantisation_gain(*pair).item() == pytest.approx(slope, rel=1e-12)


@each(("noise", "decibels"), [(0.1, 20.0), (0.01, 40.0), (1.0, 0.0)])
def test_sqnr_of_a_tenth_of_the_signal_is_20_decibels(noise: float, decibels: float) -> None:
    x = gaussian(4, 64).double()
    assert sqnr_db(x - noise * x, x).item() == pytest.approx(decibels, abs=1e-9)


def test_sqnr_is_that_of_numpy(pair: Pair) -> None:
    got, want = arrays(pair)
    decibels = 20 * np.log10(np.linalg.norm(want) / np.linalg.norm(got - want))
    assert sqnr_db(*pair).item() == pytest.approx(decibels, rel=1e-12)


# ------------------------------------------------------------------------------------------- both ends of the format


def spread(seed: int = 0) -> torch.Tensor:
    """Return rows of all magnitudes, with zeros in between."""
    x = gaussian(64, 128, seed=seed) * 2.0 ** gaussian(64, 128, seed=seed + 1).mul(6)
    return torch.where(gaussian(64, 128, seed=seed + 2) > 1, 0.0, x)


@each("axis", [0, 1])
@each("rule", ["floor", "rceil", "even"])
@each("fmt", ["E4M3", "E5M2", "E2M3", "E2M1"])
def test_both_ends_by_counting(fmt: str, rule: str, axis: int) -> None:
    x = spread()
    got = quantize(x, fmt, axis=axis, scale_rule=rule)
    values, codes = quantize_array(x.double().numpy(), fmt, axis=axis, scale_rule=rule)
    scale = np.ldexp(1.0, np.repeat(codes.astype(int) - 127, 32, axis))
    top = got.format.max
    magnitude = np.abs(x.double().numpy())
    counted = [
        (magnitude > top * scale).mean(),
        (np.abs(values) == top).mean(),
        ((values == 0) & (magnitude > 0)).mean(),
    ]
    measured = [overflow_fraction(got, x), max_fraction(got), underflow_fraction(got, x)]
    assert [m.item() for m in measured] == pytest.approx(counted, rel=1e-12)
    assert (counted[0] > 0) == (rule != "rceil")
    assert counted[1] > 0
    assert counted[2] > 0 or fmt == "E5M2"  # E5M2 alone spans 32 binades


def test_an_overflow_is_above_the_largest_number_and_not_at_it() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([1.75, 1.7500001, -1.76, 1.0])  # under floor the scale is 2^-8: 448 stands for 1.75
    got = quantize(x, "E4M3", scale_rule="floor")
    assert overflow_fraction(got, x).item() == 2 / 32
    assert max_fraction(got).item() == 3 / 32
    assert underflow_fraction(got, x).item() == 0


def test_underflow_counts_what_was_not_zero() -> None:
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([448.0, 2.0**-11, -(2.0**-10), 2.0**-9])  # the smallest at scale 1 is 2^-9; ties go to zero
    assert underflow_fraction(quantize(x, "E4M3"), x).item() == 2 / 32


def test_a_block_scale_of_zero_underflows_and_clamps_nothing() -> None:
    x = torch.full((1, 32), 2.0**-20)
    x[0, 0] = 1.0
    cast = Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", chain="training").filled(BlockCast(16))
    got = quantize_as(x, cast, -1)
    assert got.scales.float().tolist() == [[448.0, 0.0]]
    assert underflow_fraction(got, x).item() == 31 / 32
    assert max_fraction(got).item() == 1 / 32
    assert overflow_fraction(got, x).item() == 0


@each(("smallest", "share"), [(2.0**-16, 0.5), (2.0**-15, 0.5), (2.0**-14, 0.0)])
def test_a_scale_below_the_least_normal_one_is_subnormal(smallest: float, share: float) -> None:
    """The scales are 448 and 448 * smallest; the least normal one is 2^-6, and 448 is 1.75 * 2^8."""
    x = torch.cat((torch.ones(1, 16), torch.full((1, 16), smallest)), 1)
    cast = Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", chain="training").filled(BlockCast(16))
    assert subnormal_scale_fraction(quantize_as(x, cast, -1), x) == share
    assert subnormal_scale_fraction(quantize_as(x, dataclasses.replace(cast, chain="inference"), -1), x) == 0
    assert subnormal_scale_fraction(quantize(x, "E4M3"), x) == 0


@each("two_dimensional", [False, True])
def test_blocks_of_zeros_have_no_scale_that_could_be_subnormal(two_dimensional: bool) -> None:
    x = torch.zeros(48, 16)
    x[0, 0], x[16:32] = 1.0, 2.0**-16
    cast = Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", chain="training", two_dimensional=two_dimensional)
    got = quantize_as(x, cast.filled(BlockCast(16)), -1)
    assert subnormal_scale_fraction(got, x).item() == (1 / 2 if two_dimensional else 16 / 17)


def test_of_nvfp4_both_scales_count() -> None:
    x = spread()
    got = quantize(x, "NVFP4")
    largest = dataclasses.replace(got, values=torch.full_like(got.values, 6.0)).dequantize()
    assert 0 < overflow_fraction(got, x).item() == (x.abs() > largest).double().mean().item()
    below = quantize(x, "NVFP4", tensor_scale=got.tensor_scale / 2)
    assert overflow_fraction(below, x) > overflow_fraction(got, x)


def test_a_tensor_that_its_format_holds_loses_nothing() -> None:
    x = quantize(gaussian(8, 64), "E2M1").dequantize()
    got = quantize(x, "E2M1")
    assert r_squared(got.dequantize(), x).item() == quantisation_gain(got.dequantize(), x).item() == 1
    assert sqnr_db(got.dequantize(), x).item() == np.inf
    assert overflow_fraction(got, x) == underflow_fraction(got, x) == 0


@pytest.mark.slow
def test_compiled_they_are_the_same() -> None:
    def measures(x: torch.Tensor) -> list[torch.Tensor]:
        quantized: Quantized = quantize(x, "E2M1", scale_rule="floor")
        decoded = quantized.dequantize()
        return [
            r_squared(decoded, x),
            quantisation_gain(decoded, x),
            sqnr_db(decoded, x),
            overflow_fraction(quantized, x),
            max_fraction(quantized),
            underflow_fraction(quantized, x),
        ]

    x = spread()
    compiled = torch.compile(measures, fullgraph=True)(x)
    torch.testing.assert_close(compiled, measures(x), rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------- biases that were measured elsewhere

GAUSSIAN_GAINS = [
    ("E4M3", "floor", "away", 1.00009),
    ("E4M3", "floor", "even", 0.99708),
    ("E2M3", "floor", "away", 1.0017),
    ("E2M3", "floor", "even", 0.9986),
    ("E5M2", "floor", "away", 0.9980),
    ("E5M2", "floor", "even", 0.9947),
    ("E4M3", "rceil", "even", 0.9990),
]
"""Public code's numbers for blocks of 32 and operands in bf16, a draw of about a million each."""


@pytest.mark.integration
@each(("fmt", "rule", "rounding", "gain"), GAUSSIAN_GAINS)
def test_the_gain_of_a_gaussian(fmt: str, rule: str, rounding: str, gain: float) -> None:
    """The roundings differ by 0.3 %, because ties of bf16 numbers all go away from zero in one of them.

    That is six times the difference of two draws.
    """
    x = gaussian(1024, 1024, seed=5)
    got = block_cast(x, fmt, -1, BlockCast(32, rule, rounding, operand_pre_round=True)).dequantize()
    assert quantisation_gain(got, x).item() == pytest.approx(gain, abs=3e-4)
    exact = x.double().numpy()
    decoded = dequantize_array(*quantize_array(exact, fmt, 32, -1, rule, rounding, operand_pre_round=True))
    assert quantisation_gain(got, x).item() == pytest.approx((decoded * exact).sum() / (exact**2).sum(), rel=1e-12)
