"""One job of a sweep, as a launch plans it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mxstudy.config import AnyRun
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.memberships import Membership


@dataclass(frozen=True)
class Job:
    """One job of a sweep.

    `label`: what varies among the jobs, or what the command of a job alone changed. `choices`: that of each group.
    `state`: new and resume are to be run, queued and running belong to another process, finished and diverged are done.
    `replaces`: the run that is trained again; it lies in `folder` until the job is claimed. `device_type`: that of the
    job, "cuda" or "cpu". `backend`: the backends that its blocks will run on, None without a model. `also`: the labels
    of further jobs of this sweep that are the same run. `arm`, `color`: the name and the colour of its arm among these
    jobs; `name`: the name of the arm with its seeds; `shown_as`: the name of the run in MLflow, which also says what
    the command changes in all of these jobs.
    """

    config: AnyRun
    fingerprint: str
    folder: Path
    label: str
    overrides: tuple[str, ...]
    choices: dict[str, str]
    state: str = "new"
    replaces: Path | None = None
    device_type: str = "cpu"
    backend: str | None = None
    also: tuple[str, ...] = ()
    arm: str = ""
    name: str = ""
    shown_as: str = ""
    color: str = ""

    @property
    def membership(self) -> Membership:
        """Return the record that this job's sweep and experiment add to the run."""
        return Membership(
            experiment=self.config.experiment,
            label=self.label,
            overrides=self.overrides,
            choices=self.choices,
            baseline=dict(self.config.baseline),
        )

    @property
    def run(self) -> RunFolder:
        """Return the job's run folder, as this sweep asks for it."""
        return RunFolder(self.folder, self.membership)
