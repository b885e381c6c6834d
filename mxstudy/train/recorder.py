"""Record a training run: journal, checkpoints, status, progress, and the MLflow mirror that follows the journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from mxstudy.config import Run
from mxstudy.distributed import is_first
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import Journal, Row
from mxstudy.tracking.mlflow_mirror import mirror_of
from mxstudy.train.checkpoint import Checkpoints
from mxstudy.train.progress import Progress
from mxstudy.train.signals import Leave

TensorsOf = Callable[[], dict[str, Tensor]]


class Recorder:
    """Records a run on the first rank.

    `start`: the step at which the run begins or resumes. `tensors`: returns the tensors of a checkpoint.
    """

    def __init__(
        self,
        config: Run,
        folder: RunFolder,
        progress: Progress,
        start: int,
        checkpoints: Checkpoints,
        tensors: TensorsOf,
    ) -> None:
        self.folder, self.checkpoints, self.tensors, self.progress = folder, checkpoints, tensors, progress
        self.status_s = 0.0
        folder.update(step=start)
        resumes = folder.journal_path.exists()
        self.journal = Journal(folder.journal_path)
        if resumes:
            self.journal.resumed_from(start)
        self.mirror = mirror_of(config, folder, progress.label)

    def __enter__(self) -> Self:
        if self.mirror:
            self.mirror.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.journal.close()
        self.progress.close()
        if error is not None and self.mirror:
            state = "preempted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.mirror.finish(state, f"{type(error).__name__}: {error}")

    def record(self, row: Row) -> None:
        self.journal.write(row)

    def show(self, row: dict[str, Any]) -> None:
        """Show the row of a step just done on the terminal, and write its step to the status at most once a second."""
        self.progress.show(row)
        if time.monotonic() - self.status_s > 1.0:
            self.folder.update(step=row["step"] + 1)
            self.status_s = time.monotonic()

    def measuring(self, what: str, done: int, total: int) -> None:
        """Show the progress of a measurement between two steps: `done` of `total`."""
        self.progress.show_part(what, done, total)

    def save(self, step: int) -> None:
        self.journal.sync()  # first, so that no checkpoint is ahead of the journal after a power failure
        self.checkpoints.save(step, self.tensors())
        self.folder.update(step=step)
        if self.mirror:  # measurements of the last step follow its checkpoint, so that step is covered by `end` alone
            self.mirror.covered(min(step, self.progress.steps - 1))

    def end(self, state: str, reason: str | None) -> None:
        self.progress.close()
        if state == "diverged":
            print(f"diverged: {reason}; everything up to that step is in {self.folder.path}", flush=True)
        problem = self.mirror.finish(state, reason) if self.mirror else None
        if problem:
            print(f"tracking: {problem}; the journal has everything", flush=True)


class Follower:
    """The recorder of every rank but the first: it writes its shards of the checkpoints and nothing else."""

    def __init__(self, checkpoints: Checkpoints, tensors: TensorsOf) -> None:
        self.checkpoints, self.tensors = checkpoints, tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Do nothing: nothing is open."""

    def record(self, row: Row) -> None:
        """Do nothing: the first rank records the same row."""

    def measuring(self, what: str, done: int, total: int) -> None:
        """Do nothing: the first rank shows it."""

    def save(self, step: int) -> None:
        self.checkpoints.save(step, self.tensors())

    def end(self, state: str, reason: str | None) -> None:
        """Do nothing: the first rank records the end."""


# ------------------------------------------------------------------------------------------------- how a run ends


def record_end(recorder: Recorder | Follower, folder: RunFolder, state: str, why: str | None, leave: Leave) -> None:
    """Record the run's end; `why`: how it diverged, or None.

    The reason names a signal only if it stopped the run; `received_signals` also has those that came too late.
    """
    reason = leave.signal.name if state == "preempted" and leave.signal else why
    if is_first():
        folder.update(state=state, reason=reason)
    recorder.end(state, reason)


def finish_and_mirror(config: Run, folder: RunFolder, label: str, tell: Callable[[], str | None] | None = None) -> None:
    """Set the run's state to finished, mirror the whole run to the tracking server, then call `tell`.

    `tell` sends the server anything else; it returns None, or one line that says why it failed.
    """
    mirror = mirror_of(config, folder, label)
    if mirror:
        mirror.start()
    folder.update(state="finished")
    problem = mirror.finish("finished") if mirror else None
    if tell:
        problem = problem or tell()
    if problem:
        print(f"tracking: {problem}; everything is in {folder.path}", flush=True)
