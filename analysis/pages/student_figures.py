"""Make the parts of the page about figures 3, 8 and 11 of the instability paper: last bin, loss, initial weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd

from analysis.instability import claims as prestated
from analysis.pages.decisive_arms import DECISIVE_ARMS
from analysis.pages.marks import Parts, one_or_range, rows_of, share, share_of
from analysis.pages.student_lots import (
    SPIKES,
    back,
    counted,
    difference,
    final,
    findings,
    interval,
    lot,
    of_seeds,
    shown,
    spikes_in_runs,
    table_of_arms,
    verdicts,
)
from analysis.statistics import joint_level
from analysis.students import arms as replicas
from analysis.students.arms import REPLICA, middle_step, unstable
from analysis.units import SEED

GAIN_STEPS = (1200, 4800, 8900)
CODE, TEXT = (f"MXFP8 as the text has it, teacher `{teacher}`" for teacher in ("code", "paper"))


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
    CODE: partial(of, "overflow", fidelity="paper_text", teacher="code"),
    TEXT: partial(of, "overflow", fidelity="paper_text", teacher="paper"),
}


def count(*names: str) -> str:
    """Return how many of all runs of these arms diverged."""
    return counted(pd.concat([ARMS[name]() for name in names]))


def lost_at(name: str) -> str:
    """Return the earliest step of a divergence."""
    return f"{ARMS[name]()['outcome.diverged_at'].min():,.0f}"


def step_of(name: str) -> str:
    return middle_step(ARMS[name]()["outcome.diverged_at"])


def up_at_the_end(name: str) -> str:
    return share_of(ARMS[name]()["open"])


def less(name: str, other: str) -> str:
    """Return how much more often one arm diverges than the other, over the data seeds that both have."""
    return shown(replicas.difference(ARMS[name](), ARMS[other]()))


def finals(names: Sequence[str]) -> str:
    """Return the least and the most, over these arms, of the median final loss of runs that do not diverge."""
    return one_or_range(pd.Series([final(ARMS[name]()) for name in names]), ".4f")


# --------------------------------------------------------------------------------------------- figure 3: the last bin


def last_bin() -> pd.DataFrame:
    return rows_of("last_bin", "overflow")


def filling(name: str) -> tuple[pd.DataFrame, pd.Series]:
    return prestated.filling(ARMS[name](), last_bin())


def full(name: str) -> str:
    """Return how many runs of an arm have most of the first block's gains in the last bin at some step."""
    return share(len(filling(name)[0]), len(ARMS[name]()))


def full_from_to(name: str) -> str:
    found, _ = filling(name)
    return f"{found['first'].median():,.0f} to {found['last'].median():,.0f}"


def full_and_lost(name: str) -> str:
    found, _ = filling(name)
    return share(found["diverged"].sum(), len(found))


def never_full(name: str) -> str:
    """Return the steps at which those runs diverge that never have most gains in the last bin."""
    runs = ARMS[name]().set_index(REPLICA)
    odd = runs.loc[~runs.index.isin(filling(name)[0].index), "outcome.diverged_at"]
    return " and ".join(f"{step:,.0f}" for step in sorted(odd))


def full_at_the_end(name: str) -> str:
    _, ends = filling(name)
    return share_of(ends >= prestated.FILLED)


def mean_gain(name: str, step: int) -> str:
    """Return the median over runs of the first block's mean gain at a step."""
    at = last_bin().query("step == @step").merge(ARMS[name]()[REPLICA])
    return f"{at['layers.0.up.norm.weight/mean'].median():.2f}"


def all_full_from_to() -> str:
    """Return the first and the last step at which every block has most gains in the last bin.

    This holds for every run with the text's teacher.
    """
    found = last_bin().merge(ARMS[TEXT]()[REPLICA])
    least = found.filter(regex=r"\.norm\.weight/floor/overflow_fraction$").min(axis=1).groupby(found["step"]).min()
    at = least.index[least >= prestated.FILLED]
    return f"{at.min():,} to {at.max():,}"


def largest_rise(name: str) -> str:
    """Return by how much a loss exceeds its best so far, at most."""
    found = rows_of("metrics", "overflow").merge(ARMS[name]()[REPLICA]).sort_values("step")
    return f"{100 * ((found['loss'] / found.groupby(REPLICA)['loss'].cummin()).max() - 1):.1f} %"


LAST_BIN: Parts = {
    "normal numbers": lambda: f"{100 * last_bin()['gaussian.E4M3/floor/overflow_fraction'].median():.2f} %",
    **{f"mean gain, {arm}, {step}": partial(mean_gain, arm, step) for arm in ("FP32", "MXFP8") for step in GAIN_STEPS},
    **{f"full, {arm}": partial(full, arm) for arm in ("FP32", "MXFP8", CODE, TEXT)},
    **{f"full from and to, {arm}": partial(full_from_to, arm) for arm in ("FP32", "MXFP8", CODE)},
    **{
        f"{said}, {arm}": partial(of, arm)
        for arm in ("MXFP8", CODE)
        for said, of in (
            ("full and diverged", full_and_lost),
            ("never full", never_full),
            ("full at the end", full_at_the_end),
        )
    },
    "at the end, MXFP8": lambda: f"{100 * filling('MXFP8')[1].median():.1f} %",
    "all full from and to": all_full_from_to,
    "largest rise": partial(largest_rise, TEXT),
    "MXFP8, data seeds of the text": lambda: counted(of_seeds(ARMS["MXFP8"](), ARMS[CODE]())),
    "the text's minus MXFP8": partial(less, CODE, "MXFP8"),
    "teacher of the text": DECISIVE_ARMS["teacher of the text"],
    "MXFP8 minus FP32, alike": DECISIVE_ARMS["MXFP8 minus FP32"],
}


# ------------------------------------------------------------------------------------- figures 8 and 11: loss, weights

WITH_KL = ("MXFP8, KL", "FP32, KL")


def back_in(name: str) -> str:
    return back(ARMS[name]())


def middle_loss(name: str, column: str) -> str:
    return f"{ARMS[name]()[column].median():.1e}".replace("e-0", "e-")


def over_fp32(column: str) -> str:
    mxfp8, fp32 = (ARMS[name]()[column].median() for name in WITH_KL)
    return f"{mxfp8 / fp32:.1f} times"


def before(step: int) -> str:
    return share_of(pd.concat([ARMS[name]() for name in WITH_KL])["outcome.diverged_at"] < step)


def with_more_fp32() -> str:
    """Return where the interval with KL would end if FP32 had three times as many runs, and all of these diverged."""
    effect = next(iter(findings(8).values())).effect
    ours, theirs = effect.outcomes
    more = replace(effect, outcomes=(ours, pd.concat([theirs] * 3)))
    _, high = more.interval(joint_level(len(findings(8))))
    return f"{high:.2f}"


def not_stable(name: str) -> pd.DataFrame:
    """Return an arm's runs, with those that are up at the end counted as diverged."""
    runs = ARMS[name]()
    return runs.assign(diverged=unstable(runs).astype(float))


def by_initial_seed(runs: pd.DataFrame) -> str:
    """Return how many runs of each initial seed diverged: '4, 7, 5 and 6'."""
    *most, last = (f"{count:.0f}" for count in runs.groupby(SEED)["diverged"].sum())
    return f"{', '.join(most)} and {last}"


def spikes(name: str) -> str:
    return f"{ARMS[name]()['outcome.spikes'].sum():.0f}"


LOSS_AND_WEIGHTS: Parts = {
    "with KL": partial(count, *WITH_KL),
    "with KL, before step 2,000": partial(before, 2000),
    "first with KL": partial(lost_at, "MXFP8, KL"),
    **{f"step, {name}": partial(step_of, name) for name in WITH_KL},
    **{f"come back, {name}": partial(back_in, name) for name in ("MXFP8", *WITH_KL)},
    **{
        f"{said}, {name}": partial(middle_loss, name, column)
        for said, column in (("best loss", "best_loss"), ("last loss", "loss"))
        for name in WITH_KL
    },
    "best loss over FP32's": partial(over_fp32, "best_loss"),
    "KL, MXFP8 minus FP32": lambda: interval(8, 0),
    "with more FP32": with_more_fp32,
    "first with small weights": partial(lost_at, "MXFP8, small weights"),
    "up since": lambda: f"{ARMS['MXFP8, small weights']()['outcome.rising_at'].min():,.0f}",
    "small weights minus MXFP8, not stable": lambda: shown(
        replicas.difference(not_stable("MXFP8, small weights"), not_stable("MXFP8"))
    ),
    "small weights, not stable": lambda: counted(not_stable("MXFP8, small weights")),
    "small weights, by initial seed": lambda: by_initial_seed(not_stable("MXFP8, small weights")),
    "MXFP8, by initial seed": lambda: by_initial_seed(not_stable("MXFP8")),
    **{f"spikes, {name}": partial(spikes, name) for name in ("MXFP8", "MXFP8, small weights")},
}


STUDENT_FIGURES: Parts = {
    "verdicts": partial(verdicts, 3, 8, 11),
    "arms": partial(table_of_arms, ARMS, **{SPIKES: spikes_in_runs}),
    **{name: partial(count, name) for name in ARMS},
    "small weights, up at the end": partial(up_at_the_end, "MXFP8, small weights"),
    "final loss, teacher `code`": partial(finals, [name for name in ARMS if "KL" not in name and name != TEXT]),
    "final loss, teacher `paper`": partial(finals, [TEXT]),
    "MXFP8 minus FP32": partial(difference, 3, 0),
    "activations": lambda: f"{100 * list(findings(3).values())[2].value:.2f} %",
    "small weights minus MXFP8": partial(difference, 11, 0),
    **LAST_BIN,
    **LOSS_AND_WEIGHTS,
}
