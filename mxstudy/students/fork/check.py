"""Whether a run can be forked as is asked, and which forks they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mxstudy.config import Fork, StudentTeacher
from mxstudy.reader import ConfigError, require
from mxstudy.students import check as student_teacher
from mxstudy.students.fork.points import changed, fork_points
from mxstudy.tracking.columnar_journal import read_columns
from mxstudy.tracking.folder import RunFolder, named_run
from mxstudy.train.runtime import resolve_device


def check(config: Fork) -> None:
    """That there is something to fork, and that what is changed can be had; else ConfigError."""
    resolve_device(config.device, "device")
    parent, of_parent = parent_of(config)
    fork_points(config, losses_of(parent, of_parent))
    try:
        student_teacher.check(changed(of_parent, config.intervention))
    except ConfigError as error:
        raise ConfigError(f"intervention: with it {error}") from None


def backend(config: Fork) -> str | None:
    """Return the backends of the forks' blocks, with what is changed, on the device that they get."""
    _, of_parent = parent_of(config)
    device = resolve_device(config.device, "device")
    return student_teacher.backend(changed(of_parent, config.intervention), device)


def parent_of(config: Fork) -> tuple[RunFolder, StudentTeacher]:
    parent = named_run(config.parent, Path(config.runs_dir), "parent")
    of_parent: Any = parent.config()
    require(isinstance(of_parent, StudentTeacher), f"parent: {parent.path} is no student-teacher run")
    state = parent.status().state
    require(state in ("finished", "diverged"), f"parent: {parent.path} is {state}; let it finish")
    return parent, of_parent


def losses_of(parent: RunFolder, of_parent: StudentTeacher) -> np.ndarray:
    return read_columns(parent.columns, len(of_parent.replicas))[:, 0]


def identity_key(config: Fork) -> Any:
    return config.runs_dir, config.parent, config.intervene_before, config.fractions, config.at_step, config.device


def identity(config: Fork) -> tuple[str, dict[str, Any]]:
    """Kind of device; the parent, and what of it is forked where."""
    parent, of_parent = parent_of(config)
    points = [list(point) for point in fork_points(config, losses_of(parent, of_parent))]
    return resolve_device(config.device, "device").type, {"parent": parent.status().fingerprint, "forks": points}
