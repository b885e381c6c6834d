"""What the approximation study finds about casts agrees with numpy and with counts by public code."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from reference import dequantize_array, quantize_array

from mxstudy.config import Approximation
from mxstudy.data.distributions import DISTRIBUTIONS
from mxstudy.studies.approximation.tables import GRADED, TABLES, generator

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def quality() -> pd.DataFrame:
    cell = ["input", "format", "scale_rule", "rounding", "pre_round"]
    return pd.DataFrame(TABLES["quality"](Approximation(draws=3, elements=65_536))).set_index(cell).sort_index()


@pytest.mark.slow
def test_every_format_rule_and_rounding_is_there(quality: pd.DataFrame) -> None:
    mx = itertools.product(("E4M3", "E5M2", "E3M2", "E2M3", "E2M1", "E1M2"), ("floor", "ceil", "rceil", "even"))
    casts = [*mx, ("NVFP4", "E4M3")]
    wanted = {
        (name, *cast, rounding, pre_round)
        for name, cast, rounding, pre_round in itertools.product(GRADED, casts, ("even", "away"), (False, True))
    }
    assert set(quality.index) == wanted
    assert (quality["gain_standard_error"] >= 0).all()


@pytest.mark.parametrize(
    ("cell", "values"),
    [
        (("gaussian", "E4M3", "floor", "away", True), (1.00009, 0.86)),
        (("gaussian", "E4M3", "floor", "even", True), (0.99708, 0.86)),
        (("gaussian", "E4M3", "rceil", "even", True), (0.9990, 0.0)),
        (("gaussian", "E2M3", "floor", "away", True), (1.0017, None)),
        (("gaussian", "E5M2", "floor", "even", True), (0.9947, 0.86)),
        (("gain 0.99 +- 0.003", "E4M3", "floor", "even", False), (None, 98.6)),
        (("gain 1.02 +- 0.003", "E4M3", "floor", "even", False), (None, 0.0)),
        (("gain 0.95 +- 0.02", "E4M3", "floor", "even", False), (None, 82.0)),
    ],
)
def test_what_was_counted_with_public_code(quality: pd.DataFrame, cell: tuple, values: tuple) -> None:
    gain, percent = values
    row = quality.loc[cell]
    if gain is not None:
        assert row["gain"] == pytest.approx(gain, abs=5 * row["gain_standard_error"] + 1e-4)
        assert row["gain_standard_error"] < 5e-4
    if percent is not None:
        assert 100 * row["overflow"] == pytest.approx(percent, abs=0.1 if percent < 1 else 1.5)


def test_a_cell_is_the_mean_over_its_draws(quality: pd.DataFrame) -> None:
    gains, decibels, at_max = [], [], []
    for draw in range(3):
        sampler = generator(Approximation(draws=3, elements=65_536), "gelu", draw)
        x = DISTRIBUTIONS["gelu"]((64, 1024), sampler).double().numpy()
        values, scales = quantize_array(x, "E2M3", 32, -1, "even", "away", operand_pre_round=True)
        decoded = dequantize_array(values, scales).astype(float)
        gains.append((decoded * x).sum() / (x**2).sum())
        decibels.append(10 * np.log10((x**2).sum() / ((decoded - x) ** 2).sum()))
        at_max.append((np.abs(values) == 7.5).mean())
    row = quality.loc["gelu", "E2M3", "even", "away", True]
    assert row["gain"] == pytest.approx(np.mean(gains), rel=1e-9)
    assert row["gain_standard_error"] == pytest.approx(np.std(gains, ddof=1) / math.sqrt(3), rel=1e-6)
    assert row["sqnr_db"] == pytest.approx(np.mean(decibels), rel=1e-9)
    assert row["at_max"] == pytest.approx(np.mean(at_max), rel=1e-9)


def test_rules_that_round_up_never_overflow(quality: pd.DataFrame) -> None:
    by_rule = quality["overflow"].groupby("scale_rule").agg(["min", "max"])
    assert (by_rule.loc[["ceil", "rceil"], "max"] == 0).all()
    assert (by_rule.loc[["floor", "even", "E4M3"], "max"] > 0).all()
    assert (quality["overflow"] <= quality["at_max"]).all()


def test_without_ties_the_rounding_of_ties_does_nothing(quality: pd.DataFrame) -> None:
    gains = quality.xs("gaussian", level="input")["gain"].unstack(["rounding", "pre_round"])
    assert (gains["away", False] - gains["even", False]).abs().max() < 1e-5
    bias = (gains["away", True] - gains["even", True]).drop("NVFP4", level="format")
    assert bias.between(0.002, 0.005).all()


def test_formats_are_those_of_the_recipe() -> None:
    """The formats have the numbers of the MXFP8 recipe, table 1, which lacks E1M2.

    The smallest number that it prints for E3M2 is a slip: 2^-3 would be 7.8 binades.
    """
    rows = pd.DataFrame(TABLES["formats"](Approximation())).set_index("format")
    smallest = {"E4M3": -9, "E5M2": -16, "E2M3": -3, "E3M2": -4, "E2M1": -1, "E1M2": -1}
    binades = {"E4M3": 17.8, "E5M2": 31.8, "E2M3": 5.9, "E3M2": 8.8, "E2M1": 3.6, "E1M2": 2.8}
    largest = {"E4M3": 448, "E5M2": 1.75 * 2**15, "E2M3": 7.5, "E3M2": 28, "E2M1": 6, "E1M2": 3.5}
    assert np.log2(rows["min_subnormal"]).drop("NVFP4").to_dict() == smallest
    assert rows["binades"].drop("NVFP4").round(1).to_dict() == binades
    assert rows["max"].drop("NVFP4").to_dict() == largest
    assert rows["scale"].to_dict() == dict.fromkeys(smallest, "E8M0") | {"NVFP4": "E4M3"}


def test_a_cast_along_rows_is_none_along_columns_but_is_that_of_its_shards() -> None:
    """A cast along rows is not one along columns, but equals the casts of its shards.

    Other scales give other stored elements. Decoded, they differ if one of the two overflows or is subnormal.
    """
    rows = pd.DataFrame(TABLES["orientations"](Approximation())).set_index(["casts", "scale_rule"])
    assert (rows.loc["rows, columns", "stored_differ"] > 0.1).all()
    assert (rows.drop("rows, rows of each shard", level="casts")["decoded_differ"] > 0).all()
    assert rows.loc[("rows, columns", "floor"), "decoded_differ"] == pytest.approx(0.009, abs=0.001)
    assert (rows.loc["rows, rows of each shard"] == 0).all(axis=None)
