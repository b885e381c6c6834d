"""Make units from tables of runs: which runs ended, agree, died and belong together, and their paired differences."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.statistics import Effect
from mxstudy import results

SEED, DATA_SEED = SEEDS = ("config.seed", "config.data_seed")
RATE, STEPS = "config.optimizer.lr", "config.train.steps"
WIDTH, DEPTH, MLP = "config.model.hidden_size", "config.model.num_layers", "config.model.mlp"
NORM, SCALE_RULE, SKIP_BLOCKS = "config.norm.kind", "config.precision.scale_rule", "config.precision.skip_blocks"
PLAN = "config.precision.schedule.0.plan.layers.*"
ENDED = ("finished", "diverged")

Arm = Mapping[str, object]  # a value, or a tuple of values, for each column of the config that makes the arm


def power(rate: float) -> str:
    """Return a learning rate as a power of 2, '2^-9', or as it is if it is none."""
    exponent = np.log2(rate)
    return f"2^{exponent:.0f}" if exponent == round(exponent) else f"{rate:g}"


def need_columns(runs: pd.DataFrame, names: Iterable[str]) -> None:
    """Raise ValueError for missing columns, all by name, suggesting the most similar ones."""
    if missing := [name for name in names if name not in runs]:
        near = dict.fromkeys(one for name in missing for one in difflib.get_close_matches(name, map(str, runs), n=1))
        hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"the first are {', '.join([*runs][:8])}"
        raise ValueError(f"the runs have no column {', '.join(map(repr, missing))}; {hint}")


def ended(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["state"].isin(ENDED)]


def chosen(runs: pd.DataFrame, arm: Arm) -> pd.Series:
    """Return which runs have the arm's values in their configs. None means that the config has no such value."""
    is_of = pd.Series(True, runs.index)
    for column, wanted in arm.items():
        values = runs[column] if column in runs else pd.Series(np.nan, runs.index)
        is_of &= values.isna() if wanted is None else values.isin(wanted if isinstance(wanted, tuple) else [wanted])
    return is_of


def compared(arm: Arm, baseline: Arm) -> list[Arm]:
    """Return the arm, and its baseline if it has one."""
    return [arm, baseline] if baseline else [arm]


def differing(runs: pd.DataFrame, but: Collection[str] = ()) -> list[str]:
    """Return the config columns in which the runs differ, without seeds, cosmetic columns and `but`."""
    without = {*SEEDS, *but}
    studies = set(runs["config.study"]) if "config.study" in runs else {"pretrain"}
    cosmetic = tuple(f"{column}." for study in studies for column in results.cosmetic_columns(study))
    config = [c for c in runs if c.startswith("config.") and c not in without and not f"{c}.".startswith(cosmetic)]
    return [column for column in config if runs[column].map(str).nunique() > 1]


def of_one_code(runs: pd.DataFrame, arms: Sequence[Arm], unit: Sequence[str]) -> pd.DataFrame:
    """Return the runs of the code in which most units have all arms. Numbers of two codes are not pooled.

    The code is the digest in column `code` where a table has it, else the commit.
    """
    code = runs["code"] if "code" in runs and runs["code"].notna().all() else runs["commit"]
    best, most = runs.iloc[:0], (0, 0)
    for _, own in sorted(runs.groupby(code.fillna("unknown")), key=lambda group: str(group[0])):
        shared = shared_units(own, arms, unit)
        if shared and (len(shared), len(own)) > most:
            best, most = own, (len(shared), len(own))
    return best


def shared_units(runs: pd.DataFrame, arms: Sequence[Arm], unit: Sequence[str]) -> set[tuple[object, ...]]:
    """Return the units that have all arms, whichever code made their runs."""
    return set.intersection(*(units_of(runs[chosen(runs, arm)], unit) for arm in arms))


def units_of(runs: pd.DataFrame, unit: Sequence[str]) -> set[tuple[object, ...]]:
    return set(runs[[*unit]].itertuples(index=False, name=None))


def scale(runs: pd.DataFrame) -> str:
    """Return the size and length of runs: '4 x 512, 9,000 steps', or for language models '8 x 1024, 105M tokens'."""

    def values(column: str, form: str = "{:g}") -> str:
        found = sorted(runs[column].dropna().unique())
        return " to ".join(dict.fromkeys(form.format(one) for one in (found[0], found[-1])))

    size = f"{values(DEPTH)} x {values(WIDTH)}"
    if "config.train.sequence_length" not in runs:
        return f"{size}, {values(STEPS, '{:,.0f}')} steps"
    lengths = runs[STEPS] * runs["config.train.batch_size"] * runs["config.train.sequence_length"]
    tokens = sorted((lengths / 1e6).unique())
    return f"{size}, {' to '.join(dict.fromkeys(map(millions, (tokens[0], tokens[-1]))))}M tokens"


def millions(number: float) -> str:
    """Return a number of millions as a whole one, or one below 1 with its first digit."""
    return f"{number:,.0f}" if number >= 1 else f"{number:.1g}"


def less(units: Sequence[pd.Series]) -> pd.Series:
    """Return an arm's units, minus those of its baseline, if there is one, where both have them."""
    return (units[0] - units[1]).dropna() if len(units) > 1 else units[0].dropna()


def died(runs: pd.DataFrame, column: str) -> pd.Series:
    """Return which runs diverged, or have no finite value in `column` at the end."""
    return (runs["state"] == "diverged") | ~np.isfinite(runs[column].astype(float))


def paired(runs: pd.DataFrame, column: str, arm: pd.Series, baseline: pd.Series, varied: Collection[str]) -> Effect:
    """Return arm - baseline in `column`: one unit per pair of seeds, over pairs that agree in all but `varied`.

    `arm` and `baseline` have a bool per run. `varied` are the config columns, or beginnings of their names, in which
    the two arms differ. The pairs of one seed in several settings, such as learning rates, are averaged: they are one
    unit. Pairs with a run that died are in no mean. The effect's `died` counts the runs of either arm that died.
    """
    seeds = [name for name in SEEDS if name in runs]
    key = [*seeds, *(name for name in differing(runs) if not f"{name}.".startswith(tuple(f"{one}." for one in varied)))]
    values = runs[column].astype(float).mask(died(runs, column))
    texts = runs[key].map(str)
    one, other = (values[part].groupby([texts.loc[part, name] for name in key]).mean() for part in (arm, baseline))
    less = (one - other).dropna()
    units = less.groupby(level=list(range(len(seeds)))).mean()
    either = arm | baseline
    return Effect(units, died=(int(died(runs, column)[either].sum()), int(either.sum())))
