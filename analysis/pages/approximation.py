"""Make the parts of the page about norms, casts and recipes on random tensors, from the tables of approximation."""

from __future__ import annotations

from functools import cache, partial

import pandas as pd

from analysis.pages.marks import Parts, rows_of
from analysis.pages.norm_bounds import NORM_BOUNDS
from mxstudy import results

OUTLIERS = "4 features x 30"


def table(kind: str) -> pd.DataFrame:
    return rows_of(kind, "approximation")


# ------------------------------------------------------------------------------------------------------ norms and casts


def fit(features: int) -> str:
    """Return the mean r^2 of MXNorm, p = 2, blocks of 32, for rows of that many Gaussians."""
    found = table("fidelity").query("block_size == 32 and p == 2 and blocks * 32 == @features")
    return f"{found['r_squared'].mean():.4f}"


def estimate(distribution: str) -> str:
    """Return MXNorm's estimate divided by the true RMS, p = 2, in the longest rows."""
    found = table("convergence").query("distribution == @distribution and p == 2")
    return f"{found.loc[found['blocks'].idxmax(), 'mean']:.2f}"


def cast(column: str, rule: str, form: str, drawn: str = "gaussian") -> str:
    """Return a cell of `column` for that scale rule and such numbers, in E4M3, half to even."""
    found = table("quality").query(
        "input == @drawn and format == 'E4M3' and rounding == 'even' and not pre_round and scale_rule == @rule"
    )
    return f"{found[column].item():{form}}".replace("%", " %")


# -------------------------------------------------------------------------------------------------------------- recipes


@cache
def errors(drawn: str) -> pd.DataFrame:
    """Return the errors on such numbers by precision, operand, and with or without the recipe's transform."""
    rows = table("recipe_errors").query("input == @drawn")
    largest = rows.groupby(["precision", "operand"])["hadamard"].transform("max")
    return rows.assign(unrotated=rows["hadamard"] < largest).set_index(["precision", "operand", "unrotated"])


def decibels(drawn: str, precision: str, operand: str, unrotated: bool = False) -> float:
    return float(errors(drawn)["sqnr_db"][precision, operand, unrotated])


def sqnr(drawn: str, precision: str, operand: str, unrotated: bool = False) -> str:
    return f"{decibels(drawn, precision, operand, unrotated):.1f}"


def shrinks(precision: str, operand: str) -> str:
    """Return by how much the cast shrinks Gaussians: '0.37 %'."""
    return f"{100 * (1 - errors('gaussian')['gain'][precision, operand, False]):.2f} %"


def less(drawn: str, one: tuple[str, str], other: tuple[str, str]) -> str:
    """Return the SQNR of one precision's operand minus that of another's."""
    return f"{decibels(drawn, *one) - decibels(drawn, *other):.1f}"


def recipes(drawn: str) -> str:
    """Return the table of SQNRs, with those without the transform in brackets."""
    found = errors(drawn)["sqnr_db"]
    names = [list(dict.fromkeys(found.index.get_level_values(level))) for level in ("precision", "operand")]
    cells = [(precision, *(cell(found, precision, operand) for operand in names[1])) for precision in names[0]]
    return results.markdown(["precision", *names[1]], cells, left=["precision"])


def cell(found: pd.Series, precision: str, operand: str) -> str:
    own, without = (found.get((precision, operand, unrotated)) for unrotated in (False, True))
    return "-" if own is None else f"{own:.1f}" + ("" if without is None else f" ({without:.1f})")


def changed_by_transforms(drawn: str) -> str:
    """Return the most decibels by which transforms change the SQNR of an operand."""
    found = errors(drawn)["sqnr_db"].unstack("unrotated").dropna()
    return f"{(found[False] - found[True]).abs().max():.2f}"


X, DH = "forward_x", "dgrad_dh"
APPROXIMATION: Parts = {
    **{f"r^2 of {features}": partial(fit, features) for features in (1024, 4096)},
    **{f"estimate of {name}": partial(estimate, name) for name in ("laplace", "uniform")},
    "gain of floor": partial(cast, "gain", "floor", ".4f"),
    "clamped by floor": partial(cast, "overflow", "floor", ".2%"),
    "gain of rceil": partial(cast, "gain", "rceil", ".4f"),
    "clamped by rceil": partial(cast, "overflow", "rceil", ".0%"),
    "gains clamped by floor": partial(cast, "overflow", "floor", ".1%", "gain 0.99 +- 0.003"),
    "X in NVFP4": partial(sqnr, "gaussian", "nvfp4", X),
    "NVFP4 over MXFP4": partial(less, "gaussian", ("nvfp4", X), ("mxfp4_parts", X)),
    "four over six": partial(less, "gaussian", ("nvfp4_four_over_six", X), ("nvfp4", X)),
    "squares": partial(less, "gaussian", ("nvfp4_parts", "forward_w"), ("nvfp4", "forward_w")),
    "stochastic": partial(less, "gaussian", ("nvfp4_parts", DH), ("nvfp4", DH)),
    "headroom": partial(less, "gaussian", ("nvfp4", DH), ("nvfp4_four_over_six", DH)),
    "shrinks whole": partial(shrinks, "nvfp4", DH),
    "shrinks 16/17": partial(shrinks, "nvfp4_four_over_six", DH),
    "shrinks floor": partial(shrinks, "mxfp4_parts", X),
    "shrinks deviation": partial(shrinks, "quartet", X),
    "transforms of Gaussians": partial(changed_by_transforms, "gaussian"),
    "X of mxfp4_h16": partial(sqnr, OUTLIERS, "mxfp4_h16", X),
    "X of mxfp4_h16, without": partial(sqnr, OUTLIERS, "mxfp4_h16", X, unrotated=True),
    "X of nvfp4_parts, outliers": partial(sqnr, OUTLIERS, "nvfp4_parts", X),
    "X of quartet": partial(sqnr, OUTLIERS, "quartet", X),
    "X of quartet, without": partial(sqnr, OUTLIERS, "quartet", X, unrotated=True),
    "wgrad X of nvfp4": partial(sqnr, "laplace", "nvfp4", "wgrad_x"),
    "wgrad X of nvfp4, without": partial(sqnr, "laplace", "nvfp4", "wgrad_x", unrotated=True),
    "largest std": lambda: f"{table('recipe_errors')['sqnr_db_std'].max():.1f}",
    **{f"recipes, {name}": partial(recipes, name) for name in ("gaussian", "laplace", OUTLIERS)},
    **NORM_BOUNDS,
}
