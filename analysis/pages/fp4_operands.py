"""Make the parts of the page of the FP4 sweeps that say which operand of the GEMMs makes the gradient's error."""

from __future__ import annotations

import pandas as pd

from analysis.fp4.errors import OPERANDS, at_the_end
from analysis.pages.marks import Parts, least_and_most, rows_of
from analysis.units import PLAN
from mxstudy.results import markdown

TABLE, OF_BF16 = "fp4_by_operand", "fp4_where"
FORWARD, OTHERS = list(OPERANDS[:2]), list(OPERANDS[2:])
WEIGHTS = r"\.(wqkv|wo|w13|w2)\.weight"  # of the linears


def of_weights(operand: str, quantity: str) -> pd.DataFrame:
    """Return the quantity of each linear's weight, a column a weight, if this operand alone is quantised."""
    end = f"/{operand}/{quantity}"
    found = rows_of("gradient_bias", TABLE).filter(regex=f"{WEIGHTS}{end}$").astype(float)
    return found.rename(columns=lambda name: str(name).removesuffix(end))


def means(quantity: str) -> pd.DataFrame:
    """Return the mean over weights and runs, a column an operand, a row a recipe and step.

    Only linears that the recipe quantises count: those whose own gradient moves if wgrad's input is quantised.
    """
    rows, runs = rows_of("gradient_bias", TABLE), rows_of("runs", TABLE).set_index("fingerprint")
    quantised = of_weights("wgrad_x", "ratio") > 0
    values = {name: of_weights(name, quantity).where(quantised).mean(axis=1) for name in OPERANDS}
    recipes = rows["fingerprint"].map(runs[PLAN]).rename("recipe")
    return pd.DataFrame(values).groupby([recipes, rows["step"]]).mean()


def by_operand() -> str:
    """Return a table of the gradient's error at the last measurement if one operand alone is quantised.

    The length of the error over that of the gradient without any cast, and 1 - cosine of the two gradients in brackets.
    """
    runs = rows_of("runs", TABLE)
    ratios, cosines = (means(quantity).groupby("recipe").last() for quantity in ("ratio", "cosine"))
    cells = []
    for recipe, own in runs.groupby(PLAN):
        gpus = " and ".join(sorted({str(gpu).split()[1] for gpu in own["gpu"]}))
        errors = (f"{ratios.at[recipe, name]:.3f} ({1 - cosines.at[recipe, name]:.4f})" for name in OPERANDS)
        cells.append((recipe, len(own), gpus, *errors))
    return markdown(["recipe", "runs", "GPU", *OPERANDS], cells, left=["recipe", "GPU"])


def leads() -> pd.Series:
    """Return the smaller error of the forward's two operands over the largest of the others, by recipe and step."""
    ratios = means("ratio")
    return ratios[FORWARD].min(axis=1) / ratios[OTHERS].max(axis=1)


def lead_at_the_end() -> str:
    """Return the least and the most of the recipes' leads at the last measurement: '1.6 to 2.8'."""
    return least_and_most(leads().groupby("recipe").last(), ".1f")


def lead_before() -> str:
    """Return the least and the most of the recipes' leads at the measurements before the last."""
    by_step = leads().unstack("step")
    return least_and_most(by_step.iloc[:, :-1].stack(), ".1f")


def error_of_bf16() -> str:
    """Return the length of the whole gradient's error in bf16 over that of FP32's, at the last measurement."""
    runs, measured = rows_of("runs", OF_BF16), rows_of("gradient_bias", OF_BF16)
    own = measured[measured["fingerprint"].isin(runs.loc[runs[PLAN] == "bf16", "fingerprint"])]
    return f"{at_the_end(own, '^model/ratio$').mean():.3f}"


BY_OPERAND: Parts = {
    "by operand": by_operand,
    "lead of the forward": lead_at_the_end,
    "lead of the forward before": lead_before,
    "gradient of bf16": error_of_bf16,
}
