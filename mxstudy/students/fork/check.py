"""Find and check the run that is forked, and read its losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mxstudy.config import Fork, Intervention, StudentTeacher
from mxstudy.reader import ConfigError, require
from mxstudy.students.fork.points import PERTURBED
from mxstudy.students.stack import build_student
from mxstudy.tracking.columnar_journal import read_columns
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.named_runs import named_run


def parent_of(config: Fork) -> tuple[RunFolder, StudentTeacher]:
    """Return the parent run's folder and config. Raises ConfigError if it is no finished student-teacher run."""
    parent = named_run(config.parent, Path(config.runs_dir), "parent")
    of_parent = parent.config()
    if not isinstance(of_parent, StudentTeacher):
        raise ConfigError(f"parent: {parent.path} is not a student-teacher run; name one")
    state = parent.status().state
    require(state in ("finished", "diverged"), f"parent: {parent.path} is {state}; let it finish")
    return parent, of_parent


def check_perturbed(intervention: Intervention, of_parent: StudentTeacher) -> None:
    """Raise ConfigError if the element to perturb is not one of the first linear's weight."""
    element = intervention.perturbed_weight
    with torch.device("meta"):
        count = build_student(of_parent).get_parameter(PERTURBED)[0].numel()
    require(
        element is None or 0 <= element < count,
        f"intervention.perturbed_weight: must be from 0 to {count - 1}, the elements of {PERTURBED}, not {element}",
    )


def losses_of(parent: RunFolder, of_parent: StudentTeacher) -> np.ndarray:
    """Return the parent's losses, float32 [steps, S]."""
    return read_columns(parent.columns, len(of_parent.replicas))[:, 0]
