"""Say which code made the runs of a table, and whether all of them are of the same."""

from __future__ import annotations

import pandas as pd

from mxstudy.tracking.code import BESIDE, code_at, different_code


def with_code(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table of runs with a column `code`, filled by their commits if the table is older than that column."""
    if "code" in frame or not {"commit", "dirty", "config.study"} <= set(frame):
        return frame
    rows = zip(frame["commit"], frame["dirty"], frame["config.study"], strict=True)
    return frame.assign(code=[code_at(*row) for row in rows])


def mixed_code(*runs: pd.DataFrame) -> str | None:
    """Return a sentence that names the runs of these frames that different code made, or None if all have the same.

    `runs`: rows of `results.load(paths, "runs")`, or of `results.load_code`. The code of a run is `code`, torch, Triton
    and the kind of GPU. The replicas of a stack, and a run that two tables have, count once. Two runs of one
    fingerprint count each, if their commits or code differ. Different kinds of run are not compared. Runs of different
    code allow no verdict.
    """
    identity = ("fingerprint", "commit", "code", *BESIDE, "study", "config.study")
    once = pd.concat([part[[column for column in identity if column in part]] for part in runs]).drop_duplicates()
    if "code" not in once:
        return None
    return different_code(once.rename(columns={"config.study": "study"}).to_dict("records"))


def shared_fingerprint(runs: pd.DataFrame) -> str | None:
    """Return a fingerprint that runs of several commits share, or None if there is none.

    Rows of steps, probes and answers name no commit, so those of such runs cannot be told apart.
    """
    once = runs.drop_duplicates([column for column in ("fingerprint", "commit") if column in runs])["fingerprint"]
    shared = once[once.duplicated()]
    return str(shared.iloc[0]) if len(shared) else None
