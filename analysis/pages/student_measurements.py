"""Make the parts of the students' page about measurements in training: gradient bias, sharpness, the last bin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import pandas as pd

from analysis.ledger.claim import judge
from analysis.ledger.instability_runs import NOISE
from analysis.ledger.page import verdict
from analysis.ledger.students import running_mean
from analysis.ledger.tables import Tables
from analysis.pages.marks import Parts, least_and_most, one_or_range, rows_of
from analysis.pages.student_figures import LAST_BIN
from analysis.pages.student_lots import counted_and_open, lot
from analysis.statistics import Effect
from analysis.students import measures, sharpness
from analysis.students.arms import REPLICA, before_divergence
from mxstudy.results import markdown

MXFP8, BF16 = ("MXFP8, public code", "MXFP8, clean"), ("bf16, public code", "bf16, clean")
MEASURED = ("mxfp8 public_code", "mxfp8 clean", "bf16 public_code", "bf16 clean")  # the arms in the tables
# Quantities: a kind of rows and its column.
ADAM, HESSIAN = "sharpness preconditioned", "sharpness hessian"
SAME, COUPLED = "gradient_bias model/ratio", "coupled_gradient_bias model/ratio"
ZETA = "coupled_gradient_bias model/squared_ratio"
PLACES = ("before", "last", "steps", "above", "after")  # what measures.cells returns


@cache
def by_measured_arm() -> dict[str, pd.DataFrame]:
    runs = lot("gradient_bias")
    arm = runs["choice.precision"] + " " + runs["choice.fidelity"]
    return {name: runs[arm == key] for key, name in zip(MEASURED, (*MXFP8, *BF16), strict=True)}


@cache
def cells_of(quantity: str, arm: str) -> dict[str, str]:
    """Return what the figure's caption says of a quantity and arm, by place."""
    kind, column = quantity.split(" ")
    frame = rows_of(kind, "gradient_bias")
    frame = frame if kind != "sharpness" else sharpness.rows_of(frame)[0].frame
    return dict(zip(PLACES, measures.cells(by_measured_arm()[arm], frame, column), strict=True))


def gradient_bias() -> str:
    quantities = {
        "ratio, same weights": SAME,
        "cosine, same weights": "gradient_bias model/cosine",
        "squared ratio, coupled": ZETA,
        "cosine, coupled": "coupled_gradient_bias model/cosine",
    }
    cells = [
        (name, *(cells_of(quantity, name)["before"] for quantity in quantities.values()), counted_and_open(own))
        for name, own in by_measured_arm().items()
    ]
    columns = ["arm", *quantities, "diverged"]
    return markdown(columns, cells, left=columns)


def eigenvalues() -> str:
    places = ((HESSIAN, "before"), (HESSIAN, "after"), (ADAM, "before"), (ADAM, "last"), (ADAM, "after"))
    cells = [(arm, *(cells_of(quantity, arm)[place] for quantity, place in places)) for arm in by_measured_arm()]
    columns = ["arm", "Hessian, before", "after", "preconditioned, before", "the last before", "after"]
    return markdown(columns, cells, left=columns)


def by_data_seed() -> str:
    """Return a table of the numbers that decide the claims about gradients, by data seed, with the verdicts."""
    claims = [judge(claim, Tables()) for claim in NOISE]
    effects = {one.claim.id: one.evidence.found for one in claims if one.evidence}
    units = pd.DataFrame({name: found.units for name, found in effects.items() if isinstance(found, Effect)})
    seeds = sorted(units.index)
    shown = units.T.reindex([one.claim.id for one in claims])[seeds].map(lambda x: "-" if pd.isna(x) else f"{x:.4g}")
    cells = [
        (
            one.claim.id,
            *shown.loc[one.claim.id],
            one.claim.rule.words,
            verdict(one),
        )
        for one in claims
    ]
    return markdown(
        ("row", *(f"data seed {seed}" for seed in seeds), "rule", "verdict"), cells, left=["row", "rule", "verdict"]
    )


def at_divergence() -> str:
    """Return a table of what is measured in the replicas that diverge, up to their divergence, by data seed."""
    runs = lot("gradient_bias_again")
    kinds = {}
    for kind in ("coupled_gradient_bias", "sharpness"):
        measured = rows_of(kind, "gradient_bias_again").merge(runs[[*REPLICA, "data_seed", "outcome.diverged_at"]])
        kinds[kind] = before_divergence(measured[measured["outcome.diverged_at"].notna()]).sort_values("step")
    cells = []
    for seed, all_of in runs.groupby("data_seed"):
        ratios, bounds = (own[own["data_seed"] == seed].groupby(REPLICA) for own in kinds.values())
        last = ratios["model/ratio"].last()
        turns = ratios["model/ratio"].apply(lambda ratio: running_mean(ratio).min())
        cells.append(
            (
                f"{seed}",
                counted_and_open(all_of),
                f"{last.mean():.1f}",
                measures.median_and_range(last.tolist()),
                f"{(last > 2).sum()} of {len(last)}",
                measures.median_and_range(turns.tolist()),
                f"{bounds['hessian/stability'].last().mean():.4f}",
            )
        )
    columns = ["data seed", "diverged", "last ratio, mean", "median (least .. most)", "above 2"]
    columns += ["least running mean of the ratio", "left side of Eq. 10, the last, mean"]
    return markdown(columns, cells, left=columns[:1])


LAST_BIN_ARMS = {
    "mxfp8 public_code code": "MXFP8, public code (gains in bf16), teacher `code`",
    "mxfp8 paper_text code": "MXFP8, paper's text (gains in MX), teacher `code`",
    "mxfp8 paper_text paper": "MXFP8, paper's text (gains in MX), teacher `paper`",
    "fp32 none code": "FP32 (as if cast), teacher `code`",
}
GAINS, INPUTS = (
    "layers.0.up.norm.weight/floor/overflow_fraction",
    r"^layers\.\d+\.(up|down)\.input/floor/overflow_fraction$",
)


def last_bin() -> str:
    runs, found = lot("overflow"), rows_of("last_bin", "overflow")
    measured = found[[*REPLICA, "step"]].assign(
        gains=100 * found[GAINS], inputs=100 * found.filter(regex=INPUTS).mean(axis=1)
    )
    arm = runs["choice.precision"] + " " + runs["choice.fidelity"] + " " + runs["choice.teacher"]
    cells = []
    for key, name in LAST_BIN_ARMS.items():
        for which, own in (
            (" that diverge", runs[(arm == key) & (runs["diverged"] > 0)]),
            (" that do not", runs[(arm == key) & ~(runs["diverged"] > 0)]),
        ):
            if len(own):
                own_rows = measured.merge(own[[*REPLICA, "outcome.diverged_at"]]).sort_values("step")
                living = before_divergence(own_rows).groupby(REPLICA)
                most, last = living["gains"].max(), living["gains"].last()
                ends = "-" if which == " that do not" else measures.median_and_range(last.tolist())
                cells.append(
                    (
                        name + which,
                        len(own),
                        measures.median_and_range(most.tolist()),
                        ends,
                        measures.median_and_range(living["inputs"].median().tolist()),
                    )
                )
    columns = [
        "runs",
        "",
        "gains of the first block, at their most, %",
        "just before the divergence, %",
        "activations, %",
    ]
    return markdown(columns, cells, left=["runs"])


# ---------------------------------------------------------------------------------------------------- in the sentences


def medians(quantity: str, arms: Sequence[str], *places: str) -> pd.Series:
    return pd.Series([float(cells_of(quantity, arm)[place].split()[0]) for arm in arms for place in places])


def ranged(quantity: str, arms: Sequence[str], form: str, *places: str) -> str:
    """Return the least and the most of the medians of these arms at these places: '31 to 33', or '0.14'."""
    return one_or_range(medians(quantity, arms, *places), form)


def times(quantity: str, arms: Sequence[str], place: str, others: Sequence[str], other: str) -> str:
    """Return the ratio of some medians to others: '30 to 34'."""
    return least_and_most(medians(quantity, arms, place) / medians(quantity, others, other), ".0f")


def last_steps(quantity: str, *arms: str) -> str:
    """Return how many steps before a divergence the last measurement is: '2 to 10'."""
    ends = [int(word) for arm in arms for word in cells_of(quantity, arm)["steps"].split(" .. ")]
    return f"{min(ends)} to {max(ends)}"


def above(quantity: str, *arms: str) -> str:
    """Return in how many replicas the last measurement is above the 20 before: '6 of 11'."""
    counts = [map(int, cells_of(quantity, arm)["above"].split(" of ")) for arm in arms]
    return " of ".join(str(sum(column)) for column in zip(*counts, strict=True))


def lost(*names: str) -> str:
    """Return how many runs of these arms diverge, and how many are open: '0 of 8, 1 open'."""
    return counted_and_open(pd.concat([by_measured_arm()[name] for name in names]))


LIMIT = 2  # the limit of gradient descent

MEASUREMENTS: Parts = {
    "gradient bias": gradient_bias,
    "gradients by data seed": by_data_seed,
    "replicas that diverge, by data seed": at_divergence,
    "sharpness": eigenvalues,
    "last bin": last_bin,
    "normal numbers": LAST_BIN["normal numbers"],
    "zeta in mxfp8": partial(ranged, ZETA, MXFP8, ".1f", "before"),
    "zeta in bf16": partial(ranged, ZETA, BF16, ".1f", "before"),
    "coupled, steps before": partial(last_steps, COUPLED, *MXFP8),
    "coupled, last": partial(ranged, COUPLED, MXFP8, ".1f", "last"),
    "coupled, above": partial(above, COUPLED, *MXFP8),
    "coupled, after": partial(ranged, COUPLED, MXFP8, ".0f", "after"),
    "bias, before": partial(ranged, SAME, MXFP8, ".2f", "before"),
    "bias over bf16's": partial(times, SAME, MXFP8, "before", BF16, "before"),
    "bias, last": partial(ranged, SAME, MXFP8, ".2f", "last"),
    "eigenvalues": partial(ranged, ADAM, (*MXFP8, *BF16), ".0f", "before"),
    "eigenvalues, steps before": partial(last_steps, ADAM, *MXFP8),
    "eigenvalues, above": partial(above, ADAM, *MXFP8),
    **{f"steps before, {name}": partial(last_steps, ADAM, name) for name in MXFP8},
    **{f"above, {name}": partial(above, ADAM, name) for name in MXFP8},
    "Hessian of the limit": lambda: f"{100 * medians(HESSIAN, MXFP8, 'before').max() / LIMIT:.2f} %",
    "Hessian after": partial(times, HESSIAN, MXFP8, "after", MXFP8, "before"),
    "runs in bf16": partial(lost, *BF16),
    "runs in bf16, public code": partial(lost, BF16[0]),
    "Eq. 10, Hessian": partial(ranged, "sharpness hessian/stability", (*MXFP8, *BF16), ".3f", "before"),
    "Eq. 10, bf16": partial(ranged, "sharpness preconditioned/stability", BF16, ".0f", "before"),
    "Eq. 10, MXFP8": partial(ranged, "sharpness preconditioned/stability", MXFP8, ".0f", "before"),
}
