"""Decide the pilot of the main question by its rule and table, and make its parts of the page.

The rule was stated before the runs, in results/prestated.md, "Lot 4, the pilot". No claim uses these runs: they choose
a learning rate and a number of pairs for other runs, which `equivalence` compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import pandas as pd

from analysis.ledger.costs import together
from analysis.ledger.mxnorm_training import MARGIN
from analysis.pages.language_models import LOSS, NORM_CHOICE
from analysis.pages.marks import Parts, rows_of
from analysis.statistics import CONFIDENCE, student
from analysis.units import RATE, SEED, power
from mxstudy.results import markdown

BASELINE, ARM = "rmsnorm", "mxnorm_p2"
QUANTILES = 2.93  # quantiles of the normal distribution, 1.645 + 1.282, as stated
LEAST, MOST = 8, 16  # pairs
OTHER = 2.0**-10
ARMS = 4  # the arms of the main form: RMSNorm, p=1, p=2, post-round


# ------------------------------------------------------------------------------------------------------------ the rule


@dataclass(frozen=True)
class Plan:
    rate: float
    pairs: int


def losses(runs: pd.DataFrame) -> pd.DataFrame:
    """Return validation losses by rate and seed (rows) and norm (columns)."""
    return runs.pivot(index=[RATE, SEED], columns=NORM_CHOICE, values=LOSS)


def differences(runs: pd.DataFrame) -> pd.Series:
    """Return p=2 minus RMSNorm by rate and seed."""
    found = losses(runs)
    return found[ARM] - found[BASELINE]


def needed(own: pd.Series) -> int:
    """Return the least n >= 8 with 2.93 s / sqrt(n) <= the margin, where s is the differences' standard deviation."""
    return max(LEAST, math.ceil((QUANTILES * own.std(ddof=1) / MARGIN) ** 2))


def decided(runs: pd.DataFrame) -> Plan:
    """Return the rate at which RMSNorm's mean loss is lowest, and the pairs that it needs.

    If it needs more than 16 and another rate does not, return the other.
    """
    pairs = {rate: needed(own) for rate, own in differences(runs).groupby(level=RATE)}
    by_loss = [*losses(runs)[BASELINE].groupby(level=RATE).mean().sort_values().index]
    rate = next((each for each in by_loss if pairs[each] <= MOST), by_loss[0])
    return Plan(float(rate), pairs[rate])


# ------------------------------------------------------------------------------------------------------------ the page


def runs() -> pd.DataFrame:
    return rows_of("runs", "mxnorm_equivalence_pilot")


@cache
def plan() -> Plan:
    return decided(runs())


def at(rate: float) -> pd.Series:
    """Return the differences of the pairs at a learning rate, by seed."""
    return differences(runs()).loc[rate]


def deviation() -> float:
    return float(at(plan().rate).std(ddof=1))


def table() -> str:
    cells = []
    for rate, own in losses(runs()).groupby(level=RATE):
        less = at(rate)
        means = (f"{own[norm].mean():.4f}" for norm in (BASELINE, ARM))
        pairs = ", ".join(f"{one:+.4f}" for one in less)
        cells.append([power(rate), *means, pairs, f"{less.mean():+.4f}", f"{less.std(ddof=1):.4f}", needed(less)])
    seeds = ", ".join(map(str, sorted(runs()[SEED].unique())))
    columns = ["learning rate", "RMSNorm", "MXNorm p=2", f"p=2 minus RMSNorm, seeds {seeds}", "mean", "s", "n"]
    return markdown(columns, cells, left=["learning rate"])


def interval(rate: float) -> str:
    low, high = student(at(rate), CONFIDENCE)
    return f"{low:+.3f} .. {high:+.3f}"


def tokens() -> float:
    """Return the tokens of one run."""
    run = runs().iloc[0]
    return float(run[[f"config.train.{name}" for name in ("steps", "batch_size", "sequence_length")]].prod())


def speed() -> float:
    """Return the tokens/s of the processes together."""
    return together(runs())


def minutes(count: int) -> str:
    return f"{count * tokens() / speed() / 60:.0f}"


DECISION: Parts = {
    "rate": lambda: power(plan().rate),
    "s": lambda: f"{deviation():.4f}",
    "n": lambda: str(plan().pairs),
    "half-width": lambda: f"{QUANTILES * deviation() / plan().pairs ** 0.5:.5f}",
    "tokens": lambda: f"{tokens() / 1e6:.1f}",
    "tokens/s": lambda: f"{speed() / 1e6:.2f}",
    "runs of the main form": lambda: str(ARMS * plan().pairs),
    "minutes of the main form": lambda: minutes(ARMS * plan().pairs),
}
PILOT: Parts = {
    **DECISION,
    "by rate": table,
    "mean": lambda: f"{at(plan().rate).mean():+.3f}",
    "interval": lambda: interval(plan().rate),
    "above at 2^-10": lambda: f"{(at(OTHER) > 0).sum()} of {len(at(OTHER))}",
    "mean at 2^-10": lambda: f"{at(OTHER).mean():+.3f}",
    "interval at 2^-10": lambda: interval(OTHER),
    "finished": lambda: f"{(runs()['state'] == 'finished').sum()} of {len(runs())}",
    "minutes": lambda: minutes(len(runs())),
}
