"""Make tables of runs that were never trained: the jobs of a sweep, with losses by hand."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
from composing import compose

from analysis.stated import Question
from analysis.units import chosen
from mxstudy.config import read_run
from mxstudy.reader import flatten, plain


@functools.cache
def composed(*words: str) -> pd.DataFrame:
    rows = []
    for number, one in enumerate(compose(*words)):
        config = {f"config.{key}": value for key, value in flatten(plain(read_run(one.values))).items()}
        rows.append(config | {"choice.norm": one.choices["norm"], "fingerprint": f"run {number}"})
    return pd.DataFrame(rows).assign(state="finished", code="c", commit="c", spikes=0)


def runs_of(*words: str) -> pd.DataFrame:
    """Return the jobs of a command as a table has finished runs, without losses."""
    return composed(*words).copy()


def with_losses(of: Question, more: dict[str, float]) -> pd.DataFrame:
    """Return the sweep's runs with losses: each seed has its own, and an arm adds the given difference."""
    runs = runs_of(f"+sweep={of.sweep}")
    loss = 3 + runs["config.seed"] / 10 + np.random.default_rng(0).normal(0, 1e-4, len(runs))
    for name, arm in of.arms.items():
        loss += more.get(name, 0.0) * chosen(runs, arm)
    return runs.assign(validation_loss=loss, loss=loss)
