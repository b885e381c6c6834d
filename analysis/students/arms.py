"""Arms of the student-teacher study: what makes one, how its replicas ended, and what of that is different elsewhere.

A replica has diverged where its loss stays over 10 times its best for more than 500 steps. One whose loss is up there
at its end, but for fewer steps, is open: it is counted apart and is in no fraction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.compare import SEEDS
from mxstudy import results

ENDED = ("finished", "diverged")
REPLICA = ["fingerprint", "replica"]
COLUMNS = (
    *("arm", "replicas", "spikes", "in replicas", "not back", "in the last 500", "open", "diverged", "95 %"),
    *("first spike", "diverged at", "final loss", "quartiles"),
)
LEGEND = """\
Spikes: losses over 100 times the one before, all of them, and in how many replicas; not back: replicas that were not
below 10 times the best before a spike within 500 steps of it; in the last 500 steps: spikes too late to say so. Open:
up at the end, and too late to say whether they diverged; they are in no fraction. 95 %: Wilson's interval. First spike,
diverged at: median steps, of the replicas that have one. Final loss: median and quartiles, infinite where it is not
finite."""


def ended(runs: pd.DataFrame) -> pd.DataFrame:
    """Replicas of the stacks that are done; `diverged` 1, 0, or NaN where that is open."""
    done = runs[runs["state"].isin(ENDED)]
    diverged = done["outcome.diverged_at"].notna().astype(float)
    return done.assign(diverged=diverged.mask(done["outcome.rising_at"].notna() & (diverged == 0)))


def column_of(runs: pd.DataFrame, key: str) -> pd.Series:
    """A group's choices or a field's values, as words. Raises ValueError where the runs have neither."""
    name = next((name for name in (f"choice.{key}", f"config.{key}", key) if name in runs), None)
    if name is None:
        raise ValueError(f"{key}: neither a group nor a field of these runs")
    return runs[name].map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))


def named(runs: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Of each run the keys' last words with their values: 'activation gelu, norm none'."""
    words = [column_of(runs, key).map(lambda value, key=key: f"{key.split('.')[-1]} {value}") for key in keys]
    return pd.Series([", ".join(row) for row in zip(*words, strict=True)] if words else "", runs.index, dtype=object)


def sorted_arms(names: pd.Series) -> list[str]:
    """Key by key, numbers by value and all else as it comes first; as they come where not all have as many keys."""
    found = [name.split(", ") for name in dict.fromkeys(names)]
    if len({len(words) for words in found}) != 1:
        return list(dict.fromkeys(names))
    ranks = [ranked(list(dict.fromkeys(column))) for column in zip(*found, strict=True)]
    return [
        ", ".join(name)
        for name in sorted(found, key=lambda name: [rank[w] for rank, w in zip(ranks, name, strict=True)])
    ]


def ranked(words: Sequence[str]) -> dict[str, float]:
    """Of each 'key value' its place in the order."""
    try:
        return {word: float(word.split()[-1]) for word in words}
    except (ValueError, IndexError):
        return {word: place for place, word in enumerate(words)}


def table(runs: pd.DataFrame, arms: pd.Series) -> str:
    """As Markdown, a line an arm; `runs` of `ended`."""
    rows = ([arm, *cells(runs[arms == arm])] for arm in sorted_arms(arms))
    return results.markdown(COLUMNS, rows, left=["arm"]) + f"\n\n{LEGEND}\n"


def cells(runs: pd.DataFrame) -> list[str]:
    """Of one arm's replicas."""
    known = runs["diverged"].dropna()
    interval = results.fraction(int(known.sum()), len(known)) if len(known) else None
    losses = runs["loss"].astype(float).where(np.isfinite(runs["loss"].astype(float)), np.inf)
    low, middle, high = np.quantile(losses, (0.25, 0.5, 0.75), method="inverted_cdf")
    return [
        str(len(runs)),
        f"{runs['outcome.spikes'].sum():.0f}",
        str((runs["outcome.spikes"] > 0).sum()),
        str((runs["outcome.unrecovered"] > 0).sum()),
        f"{runs['outcome.censored'].sum():.0f}",
        str(len(runs) - len(known)),
        f"{known.sum():.0f} of {len(known)}",
        f"{interval.low:.2f} .. {interval.high:.2f}" if interval else "-",
        middle_step(runs["outcome.first_spike"]),
        middle_step(runs["outcome.diverged_at"]),
        f"{middle:.3g}",
        f"{low:.3g} .. {high:.3g}",
    ]


def middle_step(steps: pd.Series) -> str:
    return f"{steps.median():,.0f}" if steps.notna().any() else "-"


def by_seeds(runs: pd.DataFrame) -> dict[tuple[int, int], bool]:
    """Whether the replicas of an arm diverged, by data seed and initial seed; open ones are left out.

    Raises ValueError where two replicas have the same seeds, and so are no one arm.
    """
    known = runs.dropna(subset="diverged")
    seeds = [(int(data), int(initial)) for initial, data in zip(*(known[name] for name in SEEDS), strict=True)]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"two replicas of one arm share their seeds: {'; '.join(known['label'].unique()[:4])}")
    return dict(zip(seeds, known["diverged"] > 0, strict=True))


def difference(runs: pd.DataFrame, baseline: pd.DataFrame) -> results.PairedDifference | None:
    """How much more often those diverged, over the seeds that both have; None where they share none."""
    ours, theirs = by_seeds(runs), by_seeds(baseline)
    return results.paired_difference(ours, theirs) if ours.keys() & theirs.keys() else None


def shown(effect: results.PairedDifference | None) -> str:
    if effect is None:
        return "no shared seeds"
    return f"{effect.value:+.2f} ({effect.low:+.2f} .. {effect.high:+.2f}), {effect.pairs}: {effect.verdict}"


def of_arms(runs: pd.DataFrame, arms: pd.Series, shows: str | None) -> str:
    """A caption: what is seen, less the script's command, and the stacks that each arm is of."""
    said = [(shows or "").partition("python -m")[0].strip(), ""]
    for arm in sorted_arms(arms):
        own = runs[arms == arm]
        stacks = ", ".join(fingerprint[:12] for fingerprint in own["fingerprint"].unique())
        said.append(f"- {arm}: {len(own)} replica{'s' * (len(own) > 1)} ({stacks})")
    return "\n".join(said) + "\n"
