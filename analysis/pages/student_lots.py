"""Make the parts of the pages about students whose claims were stated before their runs: results/prestated.md.

Their verdicts leave out runs that are up at the end, as was stated. The counts of arms are of all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pandas as pd

from analysis.instability import claims as prestated
from analysis.pages.marks import rows_of, share, share_of
from analysis.statistics import joint_level
from analysis.students.arms import FractionDifference, ended_replicas, middle_step, shown_interval, unstable
from analysis.units import DATA_SEED, SEED
from mxstudy.results import markdown

OF_FIGURE = {3: "overflow", 6: "learning_rate_window", 8: "loss", 11: "initialisation"}
SPIKES = "losses over 100 times the one before"
IN_PERCENT = prestated.inputs  # the quantity that is shown in percent


@cache
def lot(name: str) -> pd.DataFrame:
    return ended_replicas(rows_of("runs", name))


@cache
def findings(figure: int) -> dict[prestated.PrestatedClaim, prestated.Finding]:
    """Return the claims of a figure, judged by the rule that was stated before their runs."""
    claims = prestated.of_figure(figure)
    last_bin = rows_of("last_bin", OF_FIGURE[figure]) if figure == 3 else pd.DataFrame()
    return {claim: prestated.judged(claim, lot(OF_FIGURE[figure]), last_bin, len(claims)) for claim in claims}


def verdicts(*figures: int) -> str:
    cells = []
    for figure in figures:
        found = findings(figure)
        level = 100 * joint_level(len(found))
        for claim, finding in found.items():
            interval = f"{number(claim, finding.low)} .. {number(claim, finding.high)}{unit(claim)} ({level:.4g} %)"
            middle = f"{number(claim, finding.value)}{unit(claim)}"
            cells.append((figure, claim.says, middle, interval, finding.units, finding.verdict, finding.price or "-"))
    columns = ["figure", "claim", "mean", "interval", "data seeds", "verdict", "what would tell"]
    return markdown(columns, cells, left=["claim", "interval", "verdict", "what would tell"])


def number(claim: prestated.PrestatedClaim, value: float) -> str:
    if claim.of is IN_PERCENT:
        return f"{100 * value:.2f}"
    return f"{value:+.2f}" if claim.baseline else f"{value:.2f}"


def unit(claim: prestated.PrestatedClaim) -> str:
    return " %" if claim.of is IN_PERCENT else ""


def difference(figure: int, place: int) -> str:
    claim, found = list(findings(figure).items())[place]
    return f"{number(claim, found.value)} {interval(figure, place)}"


def interval(figure: int, place: int) -> str:
    claim, found = list(findings(figure).items())[place]
    return f"({number(claim, found.low)} .. {number(claim, found.high)})"


def table_of_arms(arms: Mapping[str, Callable[[], pd.DataFrame]], **more: Callable[[pd.DataFrame], str]) -> str:
    """Return a table with one line per arm: how many runs diverged, and when, and in columns `more` what they say."""
    cells = []
    for name, runs_of in arms.items():
        runs = runs_of()
        cells.append(
            (
                name,
                f"{runs[DATA_SEED].nunique()} x {runs[SEED].nunique()}",
                counted(runs),
                shown_interval(runs["diverged"] > 0),
                runs["open"].sum(),
                middle_step(runs["outcome.diverged_at"]),
                *(cell(runs) for cell in more.values()),
            )
        )
    columns = [
        *("arm", "data seeds x initial seeds", "diverged by step 8,500", "95 %, Wilson", "up at the end"),
        *("median step", *more),
    ]
    return markdown(columns, cells, left=["arm", "data seeds x initial seeds", "95 %, Wilson", SPIKES])


def of_seeds(runs: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with data seeds that another arm has as well."""
    return runs[runs[DATA_SEED].isin(other[DATA_SEED])]


def spikes_in_runs(runs: pd.DataFrame) -> str:
    found = runs["outcome.spikes"]
    in_runs = (found > 0).sum()
    return f"{found.sum():.0f}, in {in_runs} runs" if in_runs else "none"


def final(runs: pd.DataFrame) -> float:
    """Return the median final loss of the runs that neither diverged nor are up at the end."""
    return float(runs.loc[~unstable(runs), "loss"].median())


def counted(runs: pd.DataFrame) -> str:
    """Return how many of these runs diverged: '21 of 32'."""
    return share_of(runs["diverged"] > 0)


def counted_and_open(runs: pd.DataFrame) -> str:
    """Return how many of these runs diverged, and how many are open: '20 of 32, 1 open'."""
    return share((runs["diverged"] > 0).sum(), len(runs), int(runs["open"].sum()))


def shown(found: FractionDifference | None) -> str:
    assert found is not None
    return f"{found.value:+.2f} ({found.low:+.2f} .. {found.high:+.2f})"


def back(runs: pd.DataFrame) -> str:
    """Return how many of the runs that diverge end below 10 times their best loss."""
    return share_of(prestated.came_back(runs, pd.DataFrame()).dropna())
