"""Judge claims by measurements on random tensors (the approximation study) and of kernels (the benchmarks)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from analysis.ledger.claim import Evidence, Judge
from analysis.ledger.tables import Missing, Tables
from analysis.statistics import Effect, Exact
from mxstudy import results

APPROXIMATION = "approximation"


def in_table(kind: str, of: Callable[[pd.DataFrame], float]) -> Judge:
    """Return a judge of one number that a function makes of a whole table of the approximation study."""

    def judge(tables: Tables) -> Evidence:
        return Evidence(Exact(of(tables.load(kind, APPROXIMATION))), "table")

    return judge


# ------------------------------------------------------------------------------------------------- theorem 1 and bounds


def off_limit(rows: pd.DataFrame, distribution: str) -> float:
    """Return the largest distance of a distribution's longest rows from its limit, in standard errors of the mean."""
    longest = rows[(rows["distribution"] == distribution) & (rows["blocks"] == rows["blocks"].max())]
    return float((((longest["mean"] - longest["limit"]) / (longest["std"] / np.sqrt(longest["rows"]))).abs()).max())


def limits_of_others(rows: pd.DataFrame) -> float:
    """Return the smallest distance of the limits of uniform and Laplace rows from the Gaussian's limit, 1."""
    return float((rows.loc[rows["distribution"] != "gaussian", "limit"] - 1).abs().min())


def over_bound(rows: pd.DataFrame, norm: str) -> float:
    """Return the largest |output| of a norm divided by its bound, over all inputs."""
    own = rows[rows["norm"] == norm]
    return float((own["absmax"] / own["bound"]).max())


def bound_ratio(rows: pd.DataFrame, norm: str) -> float:
    """Return the bound of a norm divided by RMSNorm's, at 4096 features in blocks of 32."""
    bound = rows.groupby("norm")["bound"].first()
    return float(bound[norm] / bound["RMSNorm"])


def output_rms(rows: pd.DataFrame) -> float:
    """Return the largest distance from 1 of the RMS of MXNorm's outputs on Gaussian rows."""
    own = rows[(rows["input"] == "gaussian") & (rows["norm"] != "RMSNorm")]
    return float((own["output_rms"] - 1).abs().max())


# ------------------------------------------------------------------------------------------------------------- figure 2


def fit(rows: pd.DataFrame, blocks: int, block_size: int) -> float:
    """Return the smallest r^2 of MXNorm against RMSNorm and cast, over exponents and draws."""
    return float(rows.loc[(rows["blocks"] == blocks) & (rows["block_size"] == block_size), "r_squared"].min())


def falling_fits(rows: pd.DataFrame) -> float:
    """Return how often the mean r^2 does not rise when the number of blocks doubles."""
    means = rows.groupby(["block_size", "p", "blocks"])["r_squared"].mean()
    return float((means.groupby(["block_size", "p"]).diff().dropna() <= 0).sum())


def unlike(rows: pd.DataFrame, quantity: str) -> float:
    """Return the largest total variation distance of MXNorm's distribution from RMSNorm's, over p and inputs."""
    own = rows[rows["quantity"] == quantity].pivot_table("count", ["std", "value"], "norm", fill_value=0)
    shares = own / own.groupby("std").transform("sum")
    distances = [
        shares[norm].sub(shares["RMSNorm"]).abs().groupby("std").sum() / 2 for norm in ("MXNorm p=1", "MXNorm p=2")
    ]
    return float(max(one.max() for one in distances))


# ---------------------------------------------------------------------------------------------------------------- casts


def overflow(rows: pd.DataFrame, rule: str, which: str, **only: str) -> float:
    """Return the smallest or largest fraction that a scale rule lets overflow, over formats, roundings and inputs."""
    own = rows[rows["scale_rule"] == rule]
    for column, value in only.items():
        own = own[own[column] == value]
    return float(own["overflow"].agg(which))


def decibels(rows: pd.DataFrame) -> float:
    """Return the SQNR of E4M3 minus that of E5M2 on Gaussian numbers, half to even, with scales by rceil, in dB."""
    own = rows.query("input == 'gaussian' and rounding == 'even' and not pre_round and scale_rule == 'rceil'")
    sqnr = own.set_index("format")["sqnr_db"]
    return float(sqnr["E4M3"] - sqnr["E5M2"])


def differ(rows: pd.DataFrame, casts: str, column: str, which: str = "min") -> float:
    """Return the fraction of elements in which two casts of one tensor differ, over scale rules."""
    return float(rows.loc[rows["casts"] == casts, column].agg(which))


# -------------------------------------------------------------------------------------------------------------- kernels


def shapes(of: Callable[[pd.DataFrame], pd.Series], table: str = "kernels", **only: object) -> Judge:
    """Return a judge of the logarithms of a ratio of times, one unit per shape. `of` makes ratios from a table."""

    def judge(tables: Tables) -> Evidence:
        rows = benchmark(tables, table)
        for column, value in only.items():
            rows = rows[rows[column] == value]
        ratios = of(rows).astype(float)
        return Evidence(Effect(np.log(ratios)), "shapes", f"geometric mean: {np.exp(np.log(ratios).mean()):.3f}")

    return judge


def column(name: str) -> Callable[[pd.DataFrame], pd.Series]:
    """Return what makes a ratio of times by shape: the geometric mean over formats and block sizes."""
    return lambda rows: np.exp(np.log(rows[name]).groupby([rows["hidden_size"], rows["tokens"]]).mean())


def largest(column: str) -> Judge:
    """Return a judge of the largest ratio of any shape in any format."""

    def judge(tables: Tables) -> Evidence:
        of_shapes = benchmark(tables, "kernels").groupby(["hidden_size", "tokens"])[column].max()
        return Evidence(Exact(float(of_shapes.max()), len(of_shapes)), "shapes")

    return judge


def faster(name: str) -> Judge:
    """Return a judge of the fraction of shapes in which a ratio of times is above 1."""

    def judge(tables: Tables) -> Evidence:
        above = (column(name)(benchmark(tables, "kernels")) > 1).astype(float)
        return Evidence(Effect(above, outcomes=(above,)), "shapes")

    return judge


def by_tokens(column: str) -> Judge:
    """Return a judge of the log of a ratio at the most tokens minus that at the fewest, one unit per hidden size."""

    def judge(tables: Tables) -> Evidence:
        rows = benchmark(tables, "kernels")
        wide = np.log(rows[column]).groupby([rows["hidden_size"], rows["tokens"]]).mean().unstack()
        return Evidence(Effect(wide[wide.columns.max()] - wide[wide.columns.min()]), "hidden sizes")

    return judge


def layer_ratio(rows: pd.DataFrame, kernels: str) -> pd.Series:
    """Return RMSNorm's time of a layer divided by MXNorm's, by shape, with kernels of one kind in both."""
    own = rows[rows["kernels"] == kernels].pivot_table("layer_us", ["precision", "batch", "tokens"], "norm")
    return own["rmsnorm"] / own["mxnorm"]


def layers(kernels: str, precision: str) -> Judge:
    return shapes(partial(layer_ratio, kernels=kernels), "layers", precision=precision)


def more_in_nvfp4(kernels: str) -> Judge:
    """Return a judge of the log of a layer's speedup in NVFP4 minus that in MXFP8, one unit per shape."""

    def judge(tables: Tables) -> Evidence:
        ratios = np.log(layer_ratio(benchmark(tables, "layers"), kernels)).unstack("precision")
        return Evidence(Effect(ratios["NVFP4"] - ratios["MXFP8"]), "shapes")

    return judge


def benchmark(tables: Tables, name: str) -> pd.DataFrame:
    rows = tables.one(name, results.BENCHMARK)
    if rows is None:
        raise Missing(f"no benchmark {name}")
    return rows
