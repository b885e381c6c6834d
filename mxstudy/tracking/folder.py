"""A run's folder: everything that is known about the run, in plain files.

runs/<experiment>/<fingerprint12>/
    config.yaml      the frozen config         metrics.jsonl    the journal
    provenance.json  commit, versions, host    checkpoints/
    status.json      the current state         mirror.json      how much of the journal the tracking server has
    columns/         for a stack: loss and gradient norm of every step and replica
    memberships.json the experiments and sweeps that asked for the run, if there are several
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from mxstudy import config as schemas
from mxstudy.reader import ConfigError, plain, read, require
from mxstudy.small_files import read_if_there, read_json, read_with, yaml_of
from mxstudy.tracking import memberships, unchanged
from mxstudy.tracking.code import code_in
from mxstudy.tracking.locks import try_lock, waiting_lock
from mxstudy.tracking.memberships import Membership
from mxstudy.tracking.mixed_backends import backends_in
from mxstudy.whole_files import replace_file, replace_files

C = TypeVar("C", bound=schemas.Run)

STALE_AFTER_S = 60.0
NAME_LENGTH = 12  # hex digits of the fingerprint in a folder's name
REHEARSALS = "rehearsals"  # the folder of their runs and figures, and their experiment in MLflow
CHECKPOINT = "step_"  # prefix of a checkpoint's name, followed by the step in eight digits

# The files that are sent to MLflow.
ARTIFACTS = (
    *("status.json", "config.yaml", "provenance.json", "shards.json", "tokenizer.json", "metrics.jsonl", "error.log"),
    *("scores.json", "perplexity.json", "texts.txt", memberships.NAME),
    *("tables/*.parquet", "columns/*.parquet", "spikes/*.safetensors"),
)

BEFORE_STATUS = ("status.lock", "config.yaml", "provenance.json", memberships.NAME)  # the first files of `create`

RunStatus = Literal["queued", "running", "preempted", "finished", "diverged", "failed", "cancelled"]
DONE = ("finished", "diverged")  # states with a result: no later step replaces an earlier one
MOVE_AWAY = "move the folder away to train this run again"  # what to do about a file that cannot be read
REPLACED = ".old-"  # after the name of a folder that a rerun replaces, followed by a number


class RunLocked(RuntimeError):
    """Another process is writing to this run's folder."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run's status. `step`: the next of `steps`. Times are unix times; `started_s`: when the folder was created."""

    fingerprint: str
    started_s: float
    state: RunStatus = "queued"
    reason: str | None = None
    step: int = 0
    steps: int | None = None
    host: str | None = None
    pid: int | None = None
    heartbeat_s: float | None = None
    mlflow_run_id: str | None = None
    mlflow_parent_id: str | None = None  # the parent run of the sweep that started this run

    def is_stale(self, now_s: float) -> bool:
        """Return whether the state is running but the heartbeat has stopped, because the process was killed."""
        return self.state == "running" and now_s - (self.heartbeat_s or self.started_s) > STALE_AFTER_S

    def text(self) -> str:
        """Return the content of status.json. Raises ConfigError for an invalid status now, not at the next read."""
        read(Status, values := plain(self))
        return json.dumps(values, indent=2)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a folder, the oldest first. All else there belongs to the user."""
    named = (path for path in folder.glob(f"{CHECKPOINT}*") if path.name.removeprefix(CHECKPOINT).isdecimal())
    return sorted(named, key=step_of)


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest finished checkpoint in a folder, or None."""
    return max(checkpoints_in(folder), key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """Return the step that is in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix(CHECKPOINT))


@dataclass(frozen=True)
class RunFolder:
    """`asked`: the membership by which this run was found, which names it; None: its first one."""

    path: Path
    asked: Membership | None = field(default=None, compare=False, repr=False)

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def journal_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def columns(self) -> Path:
        return self.path / "columns"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def is_rehearsal(self) -> bool:
        """Return whether the run was made with a debug choice, so that its numbers mean nothing."""
        return "debug" in self.provenance().get("choices", {})

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_steps(self) -> list[int]:
        return [step_of(path) for path in checkpoints_in(self.checkpoints)]

    def is_begun(self) -> bool:
        """Return whether a checkpoint or a finished table is kept, with which an unfinished run would go on."""
        return bool(self.checkpoint_steps()) or any(self.path.glob("tables/*.parquet"))

    def artifacts(self) -> list[Path]:
        """Return the files that describe this run and its results, the journal included but no checkpoints."""
        return sorted(path for pattern in ARTIFACTS for path in self.path.glob(pattern))

    @classmethod
    def create(
        cls,
        path: Path,
        config: schemas.Run,
        fingerprint: str,
        provenance: dict[str, Any],
        asked: Iterable[Membership] = (),
    ) -> RunFolder:
        """Create the folder of a new, queued run, status.json last, and return it. Raises ConfigError if it has a run.

        `asked`: its memberships, if they are not the one in its provenance, as those of a run that it replaces.
        """
        folder = cls(path)
        path.mkdir(parents=True, exist_ok=True)
        with folder._status_lock():
            require(not folder.status_path.exists(), f"{path}: already contains a run")
            about = provenance | {unchanged.KEY: unchanged.digest_of(config)}
            files = {"config.yaml": yaml_of(plain(config)), "provenance.json": json.dumps(about, indent=2)}
            found = memberships.joined_by((), asked)
            files |= {memberships.NAME: memberships.text_of(found)} if found else {}
            replace_files(path, files | {"status.json": Status(fingerprint=fingerprint, started_s=time.time()).text()})
        return folder

    def go_on(self, config: schemas.Run, provenance: dict[str, Any]) -> None:
        """Record the config and provenance with which an unfinished run is resumed.

        The code may have changed, and so may settings that change no number of the run.
        """
        values = plain(config) | {"experiment": self.config().experiment}  # the experiment that owns the folder
        replace_file(self.config_path, yaml_of(values))
        about = self.provenance()
        if not self.is_begun():  # it begins again, so nothing is left of earlier code, on an earlier backend
            about = {key: value for key, value in about.items() if key not in ("backend", "resumed")}
            about |= {key: provenance[key] for key in ("code", "code_files") if key in provenance}
        self.set_provenance(about | {"resumed": [*about.get("resumed", []), provenance]})

    def set_provenance(self, about: dict[str, Any]) -> None:
        replace_file(self.path / "provenance.json", json.dumps(about, indent=2))

    def config(self) -> schemas.AnyRun:
        """Return the run's config. Raises ConfigError if it was changed, or if today's schema cannot read it."""
        found = self._stored().config
        if isinstance(found, ConfigError):
            raise ConfigError(f"{self.config_path}: {found}")
        return found

    def config_values(self) -> dict[str, Any]:
        """Return the run's config as plain data, perhaps of an earlier schema. Raises ConfigError if it was changed."""
        values: dict[str, Any] = plain(self._stored().values)
        return values

    def _stored(self) -> unchanged.Stored:
        found: unchanged.Stored = read_with(unchanged.stored, self.config_path, MOVE_AWAY)
        unchanged.check_unchanged(self.config_path, found, self.provenance())
        return found

    def config_of(self, kind: type[C]) -> C:
        """Return the run's config. Raises ConfigError if the run is of another kind."""
        config = self.config()
        if not isinstance(config, kind):
            raise ConfigError(f"{self.path}: is a run of study {config.study}; one with a {kind.__name__} was expected")
        return config

    def provenance(self) -> dict[str, Any]:
        """Return where the run comes from. Raises ConfigError for a file that cannot be read."""
        return read_json(self.path / "provenance.json", MOVE_AWAY)

    def backend(self) -> str | None:
        """Return the backends that the run's blocks ran on, over all starts and resumes, or None if not recorded."""
        return backends_in(self.provenance())

    def code(self) -> str:
        """Return the digest of the code that made the run; several, if it was resumed with other code."""
        about = self.provenance()
        return code_in(about, "" if "code" in about else self.config().study)

    def memberships(self) -> list[Membership]:
        """Return the experiments and sweeps that asked for this run, in the order in which they came."""
        return memberships.read_memberships(self.path, self.provenance)

    def join(self, *new: Membership) -> None:
        """Add the memberships that the run lacks."""
        with self._status_lock():
            known = self.memberships()
            found = memberships.joined_by(known, new)
            if found != known:
                replace_file(self.path / memberships.NAME, memberships.text_of(found))

    def found_by(self, name: str) -> RunFolder | None:
        """Return this folder with its membership in the experiment or sweep of that name, or None if it has none."""
        asked = memberships.membership_in(self.memberships(), name)
        return RunFolder(self.path, asked) if asked else None

    def membership(self) -> Membership:
        return self.asked or self.memberships()[0]

    @property
    def label(self) -> str | None:
        return self.membership().label

    @property
    def own_path(self) -> Path:
        """Return the run's folder, or its former folder if a rerun has set it aside."""
        return self.path.with_name(self.path.name.partition(REPLACED)[0])

    def put_back(self) -> RunFolder:
        """Rename the run back that a rerun has set aside, if the rerun was killed before it made its own folder.

        Return the renamed run. Raises RunLocked if the rerun is making its folder now, and ConfigError if that folder
        has files of a run.
        """
        with suppress(FileNotFoundError), self.lock():  # another process may just have put it back
            if not (self.own_path / "status.json").exists():
                begun = list(self.own_path.glob("*"))
                others = [path.name for path in begun if not path.name.startswith((*BEFORE_STATUS, "."))]
                require(
                    not others, f"{self.own_path}: has {', '.join(others)} and no status.json; move the folder away"
                )
                for path in begun:
                    path.unlink()
                self.path.rename(self.own_path)
        return RunFolder(self.own_path, self.asked)

    def with_result(self) -> RunFolder:
        """Return this folder or, if it holds a rerun without a result yet, that of the run which it replaces."""
        if self.status().state not in DONE:
            for earlier in map(RunFolder, reversed(replaced(self.own_path))):
                if earlier.status().state in DONE:
                    return RunFolder(earlier.path, self.membership())
        return self

    def status(self) -> Status:
        status: Status | None = read_if_there(Status, self.status_path, MOVE_AWAY)
        if status is None:
            raise ConfigError(f"{self.path}: is no run's folder; it has no {self.status_path.name}")
        return status

    def update(self, **changes: Any) -> None:
        """Replace fields of the status and keep all others; safe while other processes update it too."""
        with self._status_lock():
            replace_file(self.status_path, dataclasses.replace(self.status(), **changes).text())

    @contextmanager
    def lock(self, wait_s: float = 0.0) -> Iterator[None]:
        """Make this process the run's only writer. Raises RunLocked if another one still is after `wait_s` seconds.

        A killed process frees its lock.
        """
        path = self.path / "run.lock"
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        until_s = time.monotonic() + wait_s
        try:
            while not self._try_lock(file):
                if time.monotonic() >= until_s:
                    holder = path.read_text() or "another process"
                    raise RunLocked(f"{self.path}: {holder} is writing to it; wait for it, or stop it")
                time.sleep(0.1)
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            yield
        finally:
            os.close(file)

    def _try_lock(self, file: int) -> bool:
        with self._status_lock():  # `is_locked` holds it as well, so only a writer can hold the run's lock
            return try_lock(file)

    def is_locked(self) -> bool:
        """Return whether a process is the run's writer; the check never refuses the lock to a process that wants it."""
        with self._status_lock(), (self.path / "run.lock").open("a") as file:
            return not try_lock(file.fileno())

    @contextmanager
    def heartbeat(self, every_s: float = 15.0) -> Iterator[None]:
        """Record host and process id, then refresh only `heartbeat_s` while the block runs."""
        self.update(host=socket.gethostname(), pid=os.getpid(), heartbeat_s=time.time())
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(every_s):
                with suppress(OSError):  # a full disk: the next beat may find room
                    self.update(heartbeat_s=time.time())

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _status_lock(self) -> AbstractContextManager[None]:
        return waiting_lock(self.path / "status.lock")


def replaced(folder: Path) -> list[Path]:
    """Return the folders of the runs that reruns in `folder` have replaced, the last one at the end."""
    found = folder.parent.glob(f"{folder.name}{REPLACED}*")
    return sorted((path for path in found if path.name.rpartition("-")[2].isdecimal()), key=number_of)


def number_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])  # N of FOLDER.old-N
