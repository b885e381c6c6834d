"""Make the parts of approximation's page about norms' bounds in FP4, and an outer scale of X from them."""

from __future__ import annotations

from functools import cache, partial

import pandas as pd

from analysis.pages.marks import Parts, least_and_most, rows_of
from mxstudy import results

CELL = ["input", "norm", "cast", "hadamard", "outer_scale"]
WORST = ("spike", "spike, transformed")
OUTER = ("tensor", "bound")
SHARES = ("subnormal_scales", "zero_scales")
W_LARGEST = 6 * 448  # the largest product of an element and a block scale of NVFP4


@cache
def table() -> pd.DataFrame:
    return rows_of("norm_bounds", "approximation")


@cache
def by_cell() -> pd.DataFrame:
    return table().set_index(CELL).sort_index()


@cache
def random_rows() -> pd.DataFrame:
    """Return the rows of NVFP4 whose inputs are drawn, and are no worst case."""
    return table().query("cast == 'NVFP4' and input not in @WORST")


def by_outer_scale(column: str, hadamard: int) -> pd.DataFrame:
    """Return a column of drawn inputs in NVFP4 by input and norm, in the order measured, one for each outer scale."""
    rows = random_rows().query("hadamard == @hadamard")
    own = rows.pivot_table(column, ["input", "norm"], "outer_scale", sort=False)
    return own[[*OUTER]]


def bounds() -> str:
    """Return the table of bounds, and of what worst cases and Gaussian rows reach, for each cast and transform."""
    lines = []
    for (cast, hadamard, norm), own in table().groupby(["cast", "hadamard", "norm"], sort=False):
        is_worst = own["input"].isin(WORST)
        first, worst = own.iloc[0], own[is_worst]
        gaussian = own[own["input"] == "gaussian"].iloc[0]
        reached = [worst[f"{kind}largest"].max() / first[f"{kind}bound"] for kind in ("", "plain_")]
        lines.append(
            (
                cast,
                norm,
                hadamard or "-",
                f"{first['bound']:.1f}",
                f"{reached[0]:.3f}",
                f"{gaussian['largest']:.1f}",
                f"{first['plain_bound']:.1f}",
                f"{reached[1]:.3f}",
            )
        )
    columns = ["cast", "norm", "transform", "bound", "reached", "Gaussian rows", "bound before it", "reached before it"]
    return results.markdown(columns, lines, left=columns[:2])


def noise(hadamard: int) -> str:
    """Return the table of SQNRs under each outer scale, and of how much larger the bound is than what is reached."""
    ratio = random_rows().query("hadamard == @hadamard and outer_scale == 'bound'").set_index(["input", "norm"])
    parts = [by_outer_scale(column, hadamard) for column in ("cast_sqnr_db", "block_sqnr_db", "output_sqnr_db")]
    lines = []
    for cell in parts[0].index:
        looser = ratio.loc[cell, "bound"] / ratio.loc[cell, "largest"]
        lines.append((*cell, f"{looser:.1f}", *(f"{part.loc[cell, outer]:.2f}" for part in parts for outer in OUTER)))
    columns = ["input", "norm", "bound / largest"]
    columns += [f"{what}, {outer}" for what in ("X", "median block", "output") for outer in OUTER]
    return results.markdown(columns, lines, left=columns[:2])


def shares() -> str:
    """Return the table of block scales that are subnormal or 0, of inputs that have some."""
    found = {(name, hadamard): by_outer_scale(name, hadamard) for name in SHARES for hadamard in (0, 16)}
    joined = pd.concat(found, axis=1)
    lines = [(*cell, *(f"{100 * value:.2f} %" for value in row)) for cell, row in joined.iterrows() if row.any()]
    names = {"subnormal_scales": "below 2^-6", "zero_scales": "0"}
    columns = ["input", "norm"] + [
        f"{names[name]}, {outer}{', H16' if hadamard else ''}" for name, hadamard in found for outer in OUTER
    ]
    return results.markdown(columns, lines, left=columns[:2])


def changed(column: str) -> str:
    """Return by how many decibels the bound in place of the absmax changes a column of drawn inputs, least to most."""
    both = pd.concat([by_outer_scale(column, hadamard) for hadamard in (0, 16)])
    return least_and_most(both["bound"] - both["tensor"], "+.2f")


def looser(norm: str) -> str:
    """Return how many times larger the norm's bound is than its largest output on Gaussian rows, untransformed."""
    row = by_cell().loc["gaussian", norm, "NVFP4", 0, "bound"]
    return f"{row['bound'] / row['largest']:.0f}"


def without_subnormal() -> str:
    """Return the largest share of subnormal scales of inputs whose large features are at most 1000 times as large."""
    ordinary = random_rows()[~random_rows()["input"].isin(["4 features x 30000", "4 features x 1000000"])]
    return f"{100 * ordinary['subnormal_scales'].max():.0f} %"


def share(column: str, drawn: str, norm: str, hadamard: int, outer: str) -> str:
    return f"{100 * by_cell().loc[(drawn, norm, 'NVFP4', hadamard, outer), column]:.0f} %"


def not_finite() -> str:
    return f"{table()['non_finite'].sum():.0f}"


def accumulator() -> str:
    """Return the largest magnitude that the accumulator of a GEMM in NVFP4 can have with any W."""
    sums = table().query("cast == 'NVFP4'")["row_sum"]
    return f"{sums.max() * W_LARGEST:.1e}"


LARGE, LARGEST = "4 features x 30000", "4 features x 1000000"
NORM_BOUNDS: Parts = {
    "norm bounds": bounds,
    "noise by outer scale": partial(noise, 0),
    "noise by outer scale, H16": partial(noise, 16),
    "small scales": shares,
    "X by bound": partial(changed, "cast_sqnr_db"),
    "RMSNorm's bound": partial(looser, "RMSNorm"),
    "p=1's bound": partial(looser, "MXNorm p=1"),
    "p=2's bound": partial(looser, "MXNorm p=2"),
    "small scales of ordinary rows": without_subnormal,
    "small scales, p=1, tensor": partial(share, SHARES[0], LARGE, "MXNorm p=1", 0, "tensor"),
    "small scales, p=1, bound": partial(share, SHARES[0], LARGE, "MXNorm p=1", 0, "bound"),
    "small scales, RMSNorm, H16, tensor": partial(share, SHARES[0], LARGE, "RMSNorm", 16, "tensor"),
    "small scales, RMSNorm, H16, bound": partial(share, SHARES[0], LARGE, "RMSNorm", 16, "bound"),
    "vanished, RMSNorm, H16, tensor": partial(share, SHARES[1], LARGEST, "RMSNorm", 16, "tensor"),
    "vanished, RMSNorm, H16, bound": partial(share, SHARES[1], LARGEST, "RMSNorm", 16, "bound"),
    "not finite": not_finite,
    "largest accumulator": accumulator,
}
