"""Find and check the run that is forked, and read its losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mxstudy.config import Fork, StudentTeacher
from mxstudy.reader import ConfigError, require
from mxstudy.tracking.columnar_journal import read_columns
from mxstudy.tracking.folder import RunFolder, named_run


def parent_of(config: Fork) -> tuple[RunFolder, StudentTeacher]:
    """Return the parent run's folder and config. Raises ConfigError if it is no finished student-teacher run."""
    parent = named_run(config.parent, Path(config.runs_dir), "parent")
    of_parent = parent.config()
    if not isinstance(of_parent, StudentTeacher):
        raise ConfigError(f"parent: {parent.path} is not a student-teacher run; name one")
    state = parent.status().state
    require(state in ("finished", "diverged"), f"parent: {parent.path} is {state}; let it finish")
    return parent, of_parent


def losses_of(parent: RunFolder, of_parent: StudentTeacher) -> np.ndarray:
    """Return the parent's losses, float32 [steps, S]."""
    return read_columns(parent.columns, len(of_parent.replicas))[:, 0]
