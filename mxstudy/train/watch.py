"""Let ranks watch each other: a failure of one rank ends all within a minute, and its cause is reported once.

Every rank writes a heartbeat to the group's store. The first rank that fails leaves its traceback there; the others
notice a rank whose heartbeat stops. A collective may wait forever for a dead rank, so a second thread ends a process
whose main thread does not return from it.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import torch.distributed as dist

from mxstudy.tracking.folder import RunFolder
from mxstudy.whole_files import replace_file

SILENTLY = "ended or froze without an error"
BEAT_S, DEAD_AFTER_S, GRACE_S = 1.0, 30.0, 5.0
# words in errors that another rank's end causes
NETWORK = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "gloo",
    "NCCL",
)


class RankDied(RuntimeError):
    """Raised when another rank ended or froze without reporting an error."""


class Watch:
    """One rank's watch over the others while the block runs.

    `connect` opens a connection to the store; each thread has its own, because a thread that waits blocks it. The first
    rank to fail raises its own exception; the others leave with SystemExit. If a rank died without reporting an error,
    the first rank to notice raises RankDied, or records it in the status of the run in `folder`.
    """

    def __init__(self, rank: int, size: int, connect: Callable[[], dist.Store], folder: RunFolder) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.name = f"rank {rank} of {size} on {socket.gethostname()}"
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives runs and processes
        prefix = f"watch/{folder.path.name}/{life}"
        self.store, self.own_store = (dist.PrefixStore(prefix, connect()) for _ in range(2))
        self.cause: str | None = None  # why another rank ended
        self.store_answered_s = time.monotonic()
        self.main, self.is_over = threading.get_ident(), threading.Event()

    def __enter__(self) -> Self:
        for task in (self.beat, self.watch):
            threading.Thread(target=task, name=task.__name__, daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.end_all(error)
        self.is_over.set()

    def end_all(self, error: BaseException) -> None:
        """Report this rank's error to all ranks. Return on the first rank to fail, raise SystemExit on the others.

        Raises RankDied if the error comes from a rank that died without reporting one.
        """
        if is_of_the_network(error):
            self.wait_for(lambda: self.cause is not None, DEAD_AFTER_S + 5 * BEAT_S)
        reported, blames = (None, self.cause) if is_silent(self.cause) else (self.cause, None)
        own = blames or f"{self.name}: {''.join(traceback.format_exception(error))}"
        first = reported or self.first_failure(self.store, own)
        self.is_over.set()
        if first != own and not isinstance(error, KeyboardInterrupt):
            self.say(f"ends because another rank has failed: {first}")
            raise SystemExit(1) from error
        self.wait_for(lambda: self.store.add("readers", 0) >= self.size - 1, GRACE_S)  # the store may be this rank's
        if blames:
            raise RankDied(blames) from error

    def first_failure(self, store: dist.Store, failure: str) -> str:
        """Report a failure, and return the one that any rank reported first.

        Returns `failure` itself if it is the first, or if the store is gone with the rank that held it.
        """
        if self.is_store_gone():
            return failure
        try:
            return store.compare_set("failure", "", failure).decode()
        except RuntimeError:
            return failure

    def is_store_gone(self) -> bool:
        return time.monotonic() - self.store_answered_s > DEAD_AFTER_S

    def wait_for(self, is_done: Callable[[], bool], at_most_s: float) -> None:
        until_s = time.monotonic() + at_most_s
        with suppress(RuntimeError):
            while time.monotonic() < until_s and not is_done():
                time.sleep(BEAT_S / 10)

    # --------------------------------------------------------------------------------------------- in the threads

    def beat(self) -> None:
        """Write this rank's heartbeat and read the others'; runs in its own thread, as the store may never answer."""
        hearts, beat = Hearts(self.rank, self.size), 0
        while self.cause is None and not self.is_over.wait(BEAT_S):
            try:
                beat += 1
                self.own_store.set(f"beat/{self.rank}", str(beat))
                if self.own_store.check(["failure"]):
                    cause = self.own_store.get("failure").decode()
                    self.own_store.add("readers", 1)
                    self.cause = cause
                elif stopped := hearts.stopped(self.own_store):
                    self.cause = f"rank {stopped[0]} of {self.size} {SILENTLY}"
                self.store_answered_s = time.monotonic()
            except RuntimeError:
                self.store_answered_s = -math.inf
                return

    def watch(self) -> None:
        """End this process if the main thread does not return after another rank has failed or the store is gone."""
        while not self.is_over.wait(BEAT_S):
            if self.cause is None and self.is_store_gone():
                self.cause = f"rank 0 of {self.size} {SILENTLY}, and the group's store with it"
            if self.cause and not self.is_over.wait(GRACE_S):
                self.give_up(self.cause)

    def give_up(self, cause: str) -> None:
        """Report the cause and end the process, whatever its main thread waits for."""
        reported = self.first_failure(self.own_store, cause)
        with suppress(OSError, ValueError):
            if reported == cause and is_silent(cause) and self.folder.status().state == "running":
                stack = "".join(traceback.format_stack(sys._current_frames()[self.main]))
                self.folder.update(state="failed", reason=f"RankDied: {cause}")
                replace_file(self.folder.path / "error.log", f"{cause}\n\n{self.name} waited at\n{stack}")
        self.say(f"ends because another rank has failed: {cause}")
        sys.stdout.flush()
        os._exit(1)

    def say(self, line: str) -> None:
        print(f"{self.name}: {line}", file=sys.stderr, flush=True)


class Hearts:
    """The last heartbeat of every other rank, and when this rank saw it, by its own clock."""

    def __init__(self, rank: int, size: int) -> None:
        self.last = {other: ("", time.monotonic()) for other in range(size) if other != rank}

    def stopped(self, store: dist.Store) -> list[int]:
        """Return the ranks whose heartbeat has not changed for more than `DEAD_AFTER_S` seconds."""
        now_s = time.monotonic()
        for other, (beat, _) in self.last.items():
            key = f"beat/{other}"
            new = store.get(key).decode() if store.check([key]) else ""
            if new != beat:
                self.last[other] = new, now_s
        return [other for other, (_, seen_s) in self.last.items() if now_s - seen_s > DEAD_AFTER_S]


def is_silent(cause: str | None) -> bool:
    """Return whether the cause is a rank that died or froze without reporting an error."""
    return cause is not None and SILENTLY in cause.splitlines()[0]


def is_of_the_network(error: BaseException) -> bool:
    """Return whether the error is what a collective raises after another rank has ended."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in NETWORK)
