"""The parts of the pages about students whose claims were stated before their runs: results/prestated.md.

Their verdicts leave out runs that are up at the end, as was stated; the counts of arms are of all runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pandas as pd

from analysis.instability import claims as prestated
from analysis.pages.marks import Parts, rows_of, share, steps, wilson
from analysis.statistics import CONFIDENCE
from analysis.students.arms import ended
from mxstudy.results import markdown

DATA_SEED, SEED, RATE, WIDTH = "config.data_seed", "config.seed", "lr", "config.model.hidden_size"
OF_FIGURE = {3: "overflow", 6: "learning_rate_window", 8: "loss", 11: "initialisation"}
IN_PERCENT = prestated.inputs  # the quantity that is shown in percent


@cache
def lot(name: str) -> pd.DataFrame:
    return ended(rows_of("runs", name))


@cache
def findings(figure: int) -> dict[prestated.Claim, prestated.Finding]:
    """Return the claims of a figure, judged by the rule that was stated before their runs."""
    claims = [claim for claim in prestated.CLAIMS if claim.figure == figure]
    last_bin = rows_of("last_bin", OF_FIGURE[figure]) if figure == 3 else pd.DataFrame()
    return {claim: prestated.judged(claim, lot(OF_FIGURE[figure]), last_bin, len(claims)) for claim in claims}


def verdicts(*figures: int) -> str:
    cells = []
    for figure in figures:
        found = findings(figure)
        level = 100 * (1 - (1 - CONFIDENCE) / len(found))
        for claim, finding in found.items():
            interval = f"{number(claim, finding.low)} .. {number(claim, finding.high)}{unit(claim)} ({level:.4g} %)"
            middle = f"{number(claim, finding.value)}{unit(claim)}"
            cells.append((figure, claim.says, middle, interval, finding.units, finding.verdict, finding.price))
    columns = ["figure", "claim", "mean", "interval", "data seeds", "verdict", "what would tell"]
    return markdown(columns, cells, left=["claim", "interval", "verdict", "what would tell"])


def number(claim: prestated.Claim, value: float) -> str:
    if claim.of is IN_PERCENT:
        return f"{100 * value:.2f}"
    return f"{value:+.2f}" if claim.baseline else f"{value:.2f}"


def unit(claim: prestated.Claim) -> str:
    return " %" if claim.of is IN_PERCENT else ""


def difference(figure: int, place: int) -> str:
    claim, found = list(findings(figure).items())[place]
    return f"{number(claim, found.value)} ({number(claim, found.low)} .. {number(claim, found.high)})"


# --------------------------------------------------------------------------------------------------------------- lot 1


def of(name: str, **chosen: str) -> pd.DataFrame:
    """Return the runs of a lot that have these choices, or values of fields with _ for the dots."""
    runs = lot(name)
    for key, value in chosen.items():
        column = f"choice.{key}" if f"choice.{key}" in runs else f"config.{key.replace('_', '.')}"
        runs = runs[runs[column] == value]
    return runs


ARMS: dict[str, Callable[[], pd.DataFrame]] = {
    "FP32": partial(of, "overflow", precision="fp32"),
    "MXFP8": partial(of, "overflow", precision="mxfp8", fidelity="public_code"),
    "MXFP8, small weights": partial(of, "initialisation", precision="mxfp8", model_init="xavier"),
    "MXFP8, KL": partial(of, "loss", precision="mxfp8", loss="kl"),
    "FP32, KL": partial(of, "loss", precision="fp32", loss="kl"),
    "MXFP8 as the text has it, teacher `code`": partial(of, "overflow", fidelity="paper_text", teacher="code"),
    "MXFP8 as the text has it, teacher `paper`": partial(of, "overflow", fidelity="paper_text", teacher="paper"),
}


def arms() -> str:
    cells = []
    for name, runs_of in ARMS.items():
        runs = runs_of()
        lost, spikes = (runs["diverged"] > 0).sum(), runs["outcome.spikes"]
        in_runs = (spikes > 0).sum()
        cells.append(
            (
                name,
                f"{runs[DATA_SEED].nunique()} x {runs[SEED].nunique()}",
                share(lost, len(runs)),
                wilson(lost, len(runs)),
                runs["open"].sum(),
                steps(runs["outcome.diverged_at"]),
                f"{spikes.sum():.0f}, in {in_runs} runs" if in_runs else "none",
            )
        )
    columns = [
        *("arm", "data seeds x initial seeds", "diverged by step 8,500", "95 %, Wilson", "up at the end"),
        *("median step", "losses over 100 times the one before"),
    ]
    return markdown(columns, cells, left=["arm", "data seeds x initial seeds", "95 %, Wilson", columns[-1]])


def count(name: str) -> str:
    runs = ARMS[name]()
    return share((runs["diverged"] > 0).sum(), len(runs))


STUDENT_FIGURES: Parts = {
    "verdicts": partial(verdicts, 3, 8, 11),
    "arms": arms,
    **{name: partial(count, name) for name in ARMS},
    "MXFP8 less FP32": partial(difference, 3, 0),
    "activations": lambda: f"{100 * list(findings(3).values())[2].value:.2f} %",
    "small weights less MXFP8": partial(difference, 11, 0),
}


# ------------------------------------------------------------------------------------------------------ learning rates

PRECISIONS = {"fp32": "FP32", "mx_mix": "MX mix"}


def window(precision: str | None = None, width: int | None = None, rate: float | None = None) -> pd.DataFrame:
    runs = lot("learning_rate_window")
    for column, value in {"choice.precision": precision, WIDTH: width, RATE: rate}.items():
        runs = runs if value is None else runs[runs[column] == value]
    return runs


def by_rate() -> str:
    cells = []
    for width, rate in sorted({*window()[[WIDTH, RATE]].itertuples(index=False, name=None)}):
        own = [window(precision, width, rate) for precision in PRECISIONS]
        lost = [part["diverged"] > 0 for part in own]
        paired = [one.groupby([part[DATA_SEED], part[SEED]]).first() for one, part in zip(lost, own, strict=True)]
        both = pd.concat(paired, axis=1, keys=["fp32", "mix"], join="inner")
        medians = [steps(part["outcome.diverged_at"]) for part in own]
        cells.append(
            (
                int(width),
                f"{rate:.0e}".replace("e-0", "e-"),
                *(f"{share(one.sum(), len(one))} ({wilson(one.sum(), len(one))})" for one in lost),
                ", ".join(str(part["open"].sum()) for part in own),
                len(both),
                (both["fp32"] & ~both["mix"]).sum(),
                (both["mix"] & ~both["fp32"]).sum(),
                "-" if medians == ["-", "-"] else " and ".join(medians),
            )
        )
    columns = [
        *("width", "learning rate", *PRECISIONS.values(), "up at the end, FP32 and MX mix", "pairs"),
        *("FP32 alone", "MX mix alone", "median step, FP32 and MX mix"),
    ]
    return markdown(columns, cells, left=["learning rate", *PRECISIONS.values(), columns[4], columns[-1]])


def by_data_seed() -> str:
    seeds, cells = sorted(window()[DATA_SEED].unique()), []
    for precision, name in PRECISIONS.items():
        for width in sorted(window()[WIDTH].unique()):
            own = window(precision, width)
            unstable = own["open"] | (own["diverged"] > 0)
            cells.append((f"{name}, width {width:.0f}", *(unstable[own[DATA_SEED] == seed].sum() for seed in seeds)))
    return markdown(["", *map(str, seeds)], cells, left=[""])


def unstable(precision: str, width: int) -> str:
    own = window(precision, width)
    return share((own["open"] | (own["diverged"] > 0)).sum(), len(own))


def diverged(precision: str, rate: float | None = None) -> str:
    own = window(precision, rate=rate)
    return share((own["diverged"] > 0).sum(), len(own))


WINDOW: Parts = {
    "verdicts": partial(verdicts, 6),
    "by rate": by_rate,
    "by data seed": by_data_seed,
    "FP32 not stable at 512": partial(unstable, "fp32", 512),
    "FP32 not stable at 768": partial(unstable, "fp32", 768),
    "MX mix": partial(diverged, "mx_mix"),
    "FP32": partial(diverged, "fp32"),
    "MX mix at 2e-4": partial(diverged, "mx_mix", 2e-4),
    "MX mix at 4e-4": partial(diverged, "mx_mix", 4e-4),
    "MX mix at 6e-4": partial(diverged, "mx_mix", 6e-4),
    "FP32 at 2e-4": partial(diverged, "fp32", 2e-4),
    "MX mix less FP32": partial(difference, 6, 2),
}
