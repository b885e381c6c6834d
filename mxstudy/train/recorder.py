"""What a training run leaves: journal, checkpoints, status, progress, and the mirror that follows the journal."""

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

State = Callable[[], dict[str, Tensor]]


class Recorder:
    """`start`: the step at which the run begins or goes on. `tensors` gives what a checkpoint holds."""

    def __init__(
        self,
        config: Run,
        folder: RunFolder,
        progress: Progress,
        start: int,
        checkpoints: Checkpoints,
        tensors: State,
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
        """A step just done, on the terminal, and now and then in the status."""
        self.progress.show(row)
        if time.monotonic() - self.status_s > 1.0:
            self.folder.update(step=row["step"] + 1)
            self.status_s = time.monotonic()

    def save(self, step: int) -> None:
        self.checkpoints.save(step, self.tensors())
        self.folder.update(step=step)
        if self.mirror:
            self.mirror.covered(step)

    def end(self, state: str, reason: str | None) -> None:
        self.progress.close()
        if state == "diverged":
            print(f"diverged: {reason}; everything up to then is in {self.folder.path}", flush=True)
        self.folder.update(state=state, reason=reason)
        behind = self.mirror.finish(state, reason) if self.mirror else None
        if behind:
            print(f"tracking: {behind}; the journal has everything", flush=True)


class Follower:
    """Of every rank but the first: it has its part of the checkpoints, and writes nothing else."""

    def __init__(self, checkpoints: Checkpoints, tensors: State) -> None:
        self.checkpoints, self.tensors = checkpoints, tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Nothing is open."""

    def record(self, row: Row) -> None:
        """The first rank's row says the same."""

    def save(self, step: int) -> None:
        self.checkpoints.save(step, self.tensors())

    def end(self, state: str, reason: str | None) -> None:
        """The first rank says it."""


# ------------------------------------------------------------------------------------------------- how a run ends


def record_end(recorder: Recorder | Follower, folder: RunFolder, state: str, why: str | None, leave: Leave) -> None:
    """`why`: what it diverged by. A signal is a reason too: one that comes too late for the run still ends a sweep."""
    recorder.end(state, reason(why, leave))
    if leave.signal and is_first():  # perhaps it came while the mirror took its time
        folder.update(reason=reason(why, leave))


def reason(why: str | None, leave: Leave) -> str | None:
    return "; ".join(filter(None, [why, leave.signal.name if leave.signal else None])) or None


def finish_and_mirror(config: Run, folder: RunFolder, label: str, tell: Callable[[], str | None] | None = None) -> None:
    """The run has finished, and is mirrored as a whole. What else the server is to be told, `tell` does after that.

    It returns None, or in one line why it could not.
    """
    follow = mirror_of(config, folder, label)
    if follow:
        follow.start()
    folder.update(state="finished")
    behind = follow.finish("finished") if follow else None
    if tell:
        behind = behind or tell()
    if behind:
        print(f"tracking: {behind}; everything is in {folder.path}", flush=True)
