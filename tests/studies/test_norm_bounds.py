"""The bounds of norms' outputs, and X's cast under an outer scale from them, are as float64 numpy computes them."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from each import each
from reference import ELEMENTS, Array, dequantize_array, quantize_array, round_to, to_dtype
from reference_mxnorm import block_absmax, rms_coefficient_by_density, rms_estimate_array

from mxstudy import results
from mxstudy.config import Approximation
from mxstudy.studies.approximation.norm_bounds import FACTORS, inputs, norm_bounds
from mxstudy.studies.approximation.run import show_norm_bounds

SIZE, ROWS = 1024, 16
STUDY = Approximation(rows=ROWS, hidden_size=SIZE, seed=3)
CELL = ["input", "norm", "cast", "outer_scale", "hadamard"]
SPIKES = {0: "spike", 16: "spike, transformed"}  # the lone spike of the cast's input, by the size of the transform
BLOCKS = {"MXFP4": 32, "NVFP4": 16}


@functools.cache
def measured() -> pd.DataFrame:
    return pd.DataFrame(norm_bounds(STUDY)).set_index(CELL)


def bound_of(norm: str, fmt: str) -> float:
    """Return Lemma 1's sqrt(D), or Lemma 2's K^(1/p) / coef, K the number of blocks."""
    if norm == "RMSNorm":
        return math.sqrt(SIZE)
    p = float(norm[-1])
    return (SIZE / BLOCKS[fmt]) ** (1 / p) / rms_coefficient_by_density(p, BLOCKS[fmt])


def turned(x: Array, size: int) -> Array:
    """Return x times Sylvester's orthonormal matrix, in tiles; x itself for a size of 0."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.reshape(-1, size) @ matrix / math.sqrt(size)).reshape(x.shape) if size else x


def output(x: Array, norm: str, fmt: str, size: int) -> Array:
    """Return x over its RMS or MXNorm's estimate, which is taken from blocks under the transform."""
    if norm == "RMSNorm":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x / rms_estimate_array(turned(x, size), float(norm[-1]), BLOCKS[fmt], 1e-5)


def cast(y: Array, fmt: str, largest: float) -> tuple[Array, Array]:
    """Return y decoded, and the scale of every block: E8M0 by floor, or E4M3 so that `largest` has 448."""
    if fmt == "MXFP4":
        values, codes = quantize_array(y, "E2M1", 32, scale_rule="floor")
        return dequantize_array(values, codes), np.exp2(codes - 127.0)
    outer = largest / (6 * 448)
    scales = np.minimum(round_to(block_absmax(y, 16) / 6 / outer, ELEMENTS["E4M3"]), 448.0)
    factors = np.repeat(scales * outer, 16, axis=-1)
    scaled = np.divide(y, factors, out=np.zeros_like(y), where=factors > 0)
    return round_to(np.clip(scaled, -6, 6), ELEMENTS["E2M1"]) * factors, scales


def decibels(got: Array, want: Array) -> float:
    return float(10 * np.log10((want**2).sum() / ((got - want) ** 2).sum()))


@pytest.mark.integration
@each("outer", ["none", "tensor", "bound"])
@each("size", [0, 16])
@each("norm", ["RMSNorm", "MXNorm p=1", "MXNorm p=2"])
def test_casts_are_as_numpy_computes_them(norm: str, size: int, outer: str) -> None:
    fmt = "MXFP4" if outer == "none" else "NVFP4"
    for name in ("laplace", "4 features x 30", "4 features x 30000", "4 features x 1000000"):
        x = inputs(STUDY)[name].double().numpy()
        xbar = output(x, norm, fmt, size)
        y = to_dtype(turned(xbar, size), "bfloat16") if size else xbar
        largest = np.abs(y).max() if outer == "tensor" else bound_of(norm, fmt)
        decoded, scales = cast(y, fmt, largest)
        above = 1.0 if fmt == "MXFP4" else largest / 2688
        found = measured().loc[name, norm, fmt, outer, size]
        assert found["largest"] == pytest.approx(np.abs(y).max(), rel=2**-8)
        assert found["plain_largest"] == pytest.approx(np.abs(xbar).max(), rel=1e-6)
        assert found["cast_sqnr_db"] == pytest.approx(decibels(decoded, y), abs=0.06)  # float32 breaks ties otherwise
        exact = x / np.sqrt((x**2).mean(-1, keepdims=True))
        assert found["output_sqnr_db"] == pytest.approx(decibels(turned(decoded, size), exact), abs=0.06)
        noise = ((decoded - y) ** 2).reshape(ROWS, -1, BLOCKS[fmt]).sum(-1)
        of_blocks = (y**2).reshape(*noise.shape, -1).sum(-1) / np.maximum(noise, 1e-300)
        assert found["block_sqnr_db"] == pytest.approx(10 * np.log10(np.median(of_blocks)), abs=0.05)
        shares = (0, 0) if fmt == "MXFP4" else ((scales < 2.0**-6).mean(), (scales == 0).mean())
        assert tuple(found[["subnormal_scales", "zero_scales"]]) == pytest.approx(shares, abs=2.5 / scales.size)
        assert found["largest_scale"] == pytest.approx(scales.max(), rel=1e-6)
        assert found["row_sum"] == pytest.approx(np.abs(decoded).sum(-1).max() / above, rel=1e-3)


def test_the_bounds_are_the_lemmas_and_a_transform_leaves_that_of_the_cast() -> None:
    rows = measured().reset_index()
    for row in rows.to_dict("records"):
        bound = bound_of(row["norm"], row["cast"])
        grows = 4 if row["hadamard"] and row["norm"] != "RMSNorm" else 1
        assert (row["bound"], row["plain_bound"]) == pytest.approx((bound, bound * grows), rel=1e-6)
    assert (rows["plain_largest"] <= rows["plain_bound"] * (1 + 1e-5)).all()
    assert (rows["largest"] <= rows["bound"] * (1 + 2**-8)).all()  # a transformed X is rounded to bf16


def test_the_worst_cases_reach_the_bounds_and_stay_finite() -> None:
    for size, name in SPIKES.items():
        own = measured().xs(size, level="hadamard").loc[name]
        assert own["largest"].to_numpy() == pytest.approx(own["bound"].to_numpy(), rel=2**-8)
        assert (own.xs("NVFP4", level="cast")["largest_scale"] == 448).all()
    before = measured().loc["spike"]
    assert before["plain_largest"].to_numpy() == pytest.approx(before["plain_bound"].to_numpy(), rel=1e-5)
    assert (measured()["non_finite"] == 0).all()
    of_e4m3 = measured().xs("NVFP4", level="cast")
    assert of_e4m3["largest_scale"].max() == 448
    assert of_e4m3["row_sum"].max() <= 2688 * SIZE  # times W's 2688, far below FP32's largest number


def test_only_outliers_make_scales_subnormal_and_a_loose_bound_makes_more_so() -> None:
    shares = measured().xs("NVFP4", level="cast")[["subnormal_scales", "zero_scales"]]
    assert (shares.loc[["gaussian", "laplace", "4 features x 30"]] == 0).all(axis=None)
    by_outer = shares.unstack("outer_scale")
    for share in shares:
        assert (by_outer[share]["bound"] >= by_outer[share]["tensor"]).all()
    assert (shares["zero_scales"] <= shares["subnormal_scales"]).all()
    assert shares["zero_scales"].xs(f"4 features x {FACTORS[-1]}", level="input").max() > 0.5


def test_the_terminal_has_each_input_and_norm_under_both_scales(monkeypatch: Any) -> None:
    frame = measured().reset_index()
    monkeypatch.setattr(results, "load_table", lambda folders, kind: frame)
    shown = show_norm_bounds(None)  # type: ignore[arg-type]
    cells = list(zip(*([*column.cells] for column in shown.columns), strict=True))
    assert len(cells) == 3 * len(inputs(STUDY))
    own = frame.query("input == 'gaussian' and norm == 'RMSNorm' and cast == 'NVFP4' and hadamard == 0")
    noise = own.set_index("outer_scale")["cast_sqnr_db"]
    assert cells[0][3:5] == (f"{noise['tensor']:.1f}", f"{noise['bound']:.1f}")
    assert float(cells[0][2]) == pytest.approx(32 / own["largest"].iloc[0], abs=0.06)
