"""Arms of the student-teacher study: their names, how their replicas ended, and differences between arms.

A replica has diverged if its loss stays over 10 times its best for more than 500 steps. So 500 steps before its end it
is known of every replica whether it has diverged by then, and fractions are of all. A replica whose loss is up at its
end, but for fewer steps, is open, and counted beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.command import without_command
from analysis.statistics import CONFIDENCE, LEAST_UNITS, Effect
from analysis.units import DATA_SEED, ENDED, SEEDS
from mxstudy import results

REPLICA = ["fingerprint", "replica"]
COLUMNS = (
    *("arm", "replicas", "spikes", "in replicas", "not back", "in the last 500", "open", "diverged", "95 %"),
    *("first spike", "diverged at", "final loss", "quartiles"),
)
LEGEND = """\
Spikes: losses over 100 times the one before, in all, and the number of replicas that have one; not back: replicas with
a spike after which the loss did not fall below 10 times the best before it within 500 steps; in the last 500 steps:
spikes too late to judge this. Diverged: of all replicas, by 500 steps before the end. Open: replicas whose loss is up
at the end, too late to tell whether they diverged. 95 %: Wilson's interval. First spike, diverged at: median steps of
the replicas that have one. Final loss: median and quartiles; losses that are not finite count as infinite."""


def ended_replicas(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the replicas of the ended stacks, with columns `diverged` (1 or 0) and `open` (bool).

    Raises ConfigError if the runs are not of students.
    """
    if "outcome.diverged_at" not in runs:
        raise results.ConfigError("--runs: these are no students; give runs of study=student_teacher, or their tables")
    done = runs[runs["state"].isin(ENDED)]
    lost = done["outcome.diverged_at"].notna()
    return done.assign(diverged=lost.astype(float), open=done["outcome.rising_at"].notna() & ~lost)


def unstable(runs: pd.DataFrame) -> pd.Series:
    """Return which runs diverged or are up at the end."""
    return (runs["diverged"] > 0) | runs["open"]


def by_pair(runs: pd.DataFrame, column: str, one: str, other: str, key: Sequence[str]) -> pd.Series:
    """Return a number for each two runs that agree in `key`, one with `one` and one with `other` in a column.

    It is 1 if only the first diverged, -1 if only the other did, else 0.
    """
    wide = runs.pivot(index=[*key], columns=column, values="diverged")
    return (wide[one] - wide[other]).dropna()


def alone(pairs: pd.Series) -> tuple[int, int]:
    """Return in how many pairs, from `by_pair`, only the first diverged, and in how many only the other."""
    return int((pairs > 0).sum()), int((pairs < 0).sum())


def before_divergence(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows before their replica's divergence, which are all of them if there is none."""
    return rows[~(rows["step"] >= rows["outcome.diverged_at"])]


def column_of(runs: pd.DataFrame, key: str) -> pd.Series:
    """Return a group's choices or a field's values as text. Raises ValueError if the runs have neither."""
    name = next((name for name in (f"choice.{key}", f"config.{key}", key) if name in runs), None)
    if name is None:
        raise ValueError(f"{key}: is neither a group nor a field of these runs")
    return runs[name].map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))


def named(runs: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Return each run's name from the last word of each key and its value: 'activation gelu, norm none'."""
    words = [column_of(runs, key).map(lambda value, key=key: f"{key.split('.')[-1]} {value}") for key in keys]
    return pd.Series([", ".join(row) for row in zip(*words, strict=True)] if words else "", runs.index, dtype=object)


def sorted_arms(names: pd.Series) -> list[str]:
    """Return the names sorted key by key, numbers by value, words by first occurrence.

    If the names have different numbers of keys, their order is kept.
    """
    found = [name.split(", ") for name in dict.fromkeys(names)]
    if len({len(words) for words in found}) != 1:
        return list(dict.fromkeys(names))
    ranks = [ranked(list(dict.fromkeys(column))) for column in zip(*found, strict=True)]
    return [
        ", ".join(name)
        for name in sorted(found, key=lambda name: [rank[w] for rank, w in zip(ranks, name, strict=True)])
    ]


def ranked(words: Sequence[str]) -> dict[str, float]:
    """Return the rank of each 'key value': the value if all are numbers, else the index."""
    try:
        return {word: float(word.split()[-1]) for word in words}
    except (ValueError, IndexError):
        return {word: place for place, word in enumerate(words)}


def table(runs: pd.DataFrame, arms: pd.Series) -> str:
    """Return Markdown with one line per arm. `runs` are from `ended_replicas`."""
    rows = ([arm, *cells(runs[arms == arm])] for arm in sorted_arms(arms))
    return results.markdown(COLUMNS, rows, left=["arm"]) + f"\n\n{LEGEND}\n"


def cells(runs: pd.DataFrame) -> list[str]:
    """Return the cells of one arm's line, without its name."""
    low, middle, high = quartiles(runs["loss"])
    return [
        str(len(runs)),
        f"{runs['outcome.spikes'].sum():.0f}",
        str((runs["outcome.spikes"] > 0).sum()),
        str((runs["outcome.unrecovered"] > 0).sum()),
        f"{runs['outcome.censored'].sum():.0f}",
        str(runs["open"].sum()),
        f"{runs['diverged'].sum():.0f} of {len(runs)}",
        shown_interval(runs["diverged"]),
        middle_step(runs["outcome.first_spike"]),
        middle_step(runs["outcome.diverged_at"]),
        f"{middle:.3g}",
        f"{low:.3g} .. {high:.3g}",
    ]


def quartiles(losses: pd.Series) -> np.ndarray:
    """Return the quartiles, each the loss of a replica. Losses that are not finite count as infinite."""
    values = losses.astype(float)
    return np.quantile(values.where(np.isfinite(values), np.inf), (0.25, 0.5, 0.75), method="inverted_cdf")


def shown_interval(happened: pd.Series) -> str:
    """Return Wilson's 95 % interval of the fraction that is true, or 1: '0.45 .. 0.77'."""
    found = results.fraction(int(happened.sum()), len(happened))
    return f"{found.low:.2f} .. {found.high:.2f}"


def middle_step(steps: pd.Series) -> str:
    """Return the median step, or '-' if there is none."""
    return f"{steps.median():,.0f}" if steps.notna().any() else "-"


MIXED = "cannot tell (mixed code)"


class FractionDifference(NamedTuple):
    """A difference of two fractions that diverged, -1 to 1, with its 95 % interval over `units` data seeds.

    `is_mixed` says that its runs are of different code, so that no verdict is made from it.
    """

    value: float
    low: float
    high: float
    units: int
    is_mixed: bool = False

    @property
    def verdict(self) -> str:
        if self.is_mixed:
            return MIXED
        if self.units < LEAST_UNITS or not (self.low > 0 or self.high < 0):
            return "cannot tell"
        return "more often" if self.low > 0 else "less often"

    def __str__(self) -> str:
        spread = f" ({self.low:+.2f} .. {self.high:+.2f})" if self.units > 1 else ""
        return f"{self.value:+.2f}{spread}, {self.units}: {self.verdict}"


def difference(runs: pd.DataFrame, baseline: pd.DataFrame, over: Sequence[str] = ()) -> FractionDifference | None:
    """Return how much more often `runs` diverged than `baseline`, or None if they share no data seed.

    All runs count. `over` are columns with the settings of an arm. The replicas of a data seed share teacher and
    batches, and are averaged first in each setting. Then a data seed's settings that both have are averaged. Raises
    ValueError if two replicas of one setting have the same seeds.
    """
    columns = [*SEEDS, *over, "label", "diverged"]
    parts = [part[columns].assign(diverged=(part["diverged"] > 0).astype(float)) for part in (runs, baseline)]
    for part in parts:
        if part.duplicated([*SEEDS, *over]).any():
            names = "; ".join(part["label"].unique()[:4])
            raise ValueError(f"two replicas of one arm share their seeds: {names}")
    ours, theirs = (part.groupby([DATA_SEED, *over])["diverged"].mean() for part in parts)
    units = (ours - theirs).dropna().groupby(level=0).mean()
    if not len(units):
        return None
    one, other = (part["diverged"] for part in parts)
    return of_units(units, (one, other), CONFIDENCE, [runs, baseline])


def of_units(
    units: pd.Series, outcomes: tuple[pd.Series, pd.Series], level: float, runs: Sequence[pd.DataFrame]
) -> FractionDifference:
    """Return the difference that has these units. `outcomes` are those of each of the `runs` of both arms."""
    low, high = Effect(units, outcomes=outcomes).interval(level)
    is_mixed = results.mixed_code(*runs) is not None
    return FractionDifference(float(units.mean()), low, high, len(units), is_mixed)


def shown(effect: FractionDifference | None) -> str:
    return "no shared seeds" if effect is None else str(effect)


def of_arms(runs: pd.DataFrame, arms: pd.Series, shows: str | None) -> str:
    """Return a caption: the script's docstring without its command, and the stacks of each arm."""
    said = [without_command(shows), ""]
    for arm in sorted_arms(arms):
        own = runs[arms == arm]
        stacks = ", ".join(fingerprint[:12] for fingerprint in own["fingerprint"].unique())
        said.append(f"- {arm}: {len(own)} replica{'s' * (len(own) > 1)} ({stacks})")
    return "\n".join(said) + "\n"
