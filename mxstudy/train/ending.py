"""How runs end: what their status says of it, and what the tracking server has of them."""

from __future__ import annotations

from collections.abc import Callable

from mxstudy.config import Run
from mxstudy.distributed import is_first
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_mirror import mirror_of
from mxstudy.train.recorder import Follower, Recorder
from mxstudy.train.signals import Leave


def end_told(recorder: Recorder | Follower, folder: RunFolder, state: str, why: str | None, leave: Leave) -> None:
    """`why`: what it diverged by. A signal is a reason too: one that comes too late for the run still ends a sweep."""
    recorder.end(state, reason(why, leave))
    if leave.signal and is_first():  # perhaps it came while the mirror took its time
        folder.update(reason=reason(why, leave))


def reason(why: str | None, leave: Leave) -> str | None:
    return "; ".join(filter(None, [why, leave.signal.name if leave.signal else None])) or None


def end_mirrored(config: Run, folder: RunFolder, label: str, tell: Callable[[], str | None] | None = None) -> None:
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
