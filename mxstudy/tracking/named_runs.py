"""Find the run that a user names by its folder, its fingerprint or its MLflow run id."""

from __future__ import annotations

import os
from pathlib import Path

from mxstudy.reader import ConfigError, require
from mxstudy.tracking.folder import REHEARSALS, RunFolder
from mxstudy.tracking.found_runs import find_runs

SHORTEST_PREFIX = 6  # hex digits that suffice to name a run


def named_run(text: str, runs_dir: Path, key: str) -> RunFolder:
    """Return the run that `text` names by its folder, its fingerprint or a prefix of it, or its MLflow run id.

    Until a rerun has ended, this is the run that it replaces. Raises ConfigError, with the config key `key`, if `text`
    names no run or several.
    """
    if os.path.isfile(Path(text, "status.json")):  # False for a name that is too long
        return RunFolder(Path(text)).with_result()
    runs = [run for run in find_runs(runs_dir) if is_called(run, text)]
    if not runs:
        others = f"no run in {runs_dir}/ has such a fingerprint or MLflow run id"
        there = f"; give its folder, {found.path}" if (found := elsewhere(text, runs_dir)) else ""
        more = f"; give at least {SHORTEST_PREFIX} digits of a fingerprint" if len(text) < SHORTEST_PREFIX else ""
        raise ConfigError(f"{key}: {text!r} is not a run's folder, and {others}{there}{more}")
    names = sorted({run.status().fingerprint for run in runs})
    require(len(names) == 1, f"{key}: {text!r} matches each of {', '.join(name[:12] for name in names)}")
    return max(runs, key=lambda run: run.status().started_s).with_result()


def is_called(run: RunFolder, text: str) -> bool:
    try:
        status = run.status()
    except ConfigError:  # an unreadable run does not hide the others
        return len(text) >= SHORTEST_PREFIX and run.path.name.startswith(text)
    begins = len(text) >= SHORTEST_PREFIX and status.fingerprint.startswith(text)
    return begins or status.mlflow_run_id == text


def elsewhere(text: str, runs_dir: Path) -> RunFolder | None:
    """Return the run of that name among the rehearsals; if these are what `runs_dir` has, among the real runs."""
    other = runs_dir.parent if runs_dir.name == REHEARSALS else runs_dir / REHEARSALS
    return next((run for run in find_runs(other) if is_called(run, text)), None)
