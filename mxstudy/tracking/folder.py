"""A run's folder: everything that is known about a run, in plain files.

runs/<experiment>/<fingerprint12>/
    config.yaml      the frozen config         metrics.jsonl    the journal
    provenance.json  commit, versions, host    checkpoints/
    status.json      what goes on, right now   mirror.json      how far the tracking server has the journal
    columns/         of a stack of runs: every step of each
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from mxstudy import config as schemas
from mxstudy.reader import ConfigError, plain, read, require
from mxstudy.tracking.arms import all_backends

STALE_AFTER_S = 60.0
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml, where PyYAML has it, is ten times as fast
NAME_LENGTH = 12  # hex digits of the fingerprint in a folder's name
SHORTEST_PREFIX = 6  # of them, that name a run
CHECKPOINT = "step_"  # begins the names of checkpoints, the step in eight digits

# What MLflow gets of it.
ARTIFACTS = (
    *("status.json", "config.yaml", "provenance.json", "shards.json", "tokenizer.json", "metrics.jsonl", "error.log"),
    *("scores.json", "perplexity.json"),
    *("tables/*.parquet", "columns/*.parquet", "spikes/*.safetensors"),
)

State = Literal["queued", "running", "preempted", "finished", "diverged", "failed", "cancelled"]


class RunLocked(RuntimeError):
    """Another process writes to this run's folder."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """`step`: the next one to be done, of `steps`; times are unix times, `started_s` of the folder's making."""

    fingerprint: str
    started_s: float
    state: State = "queued"
    reason: str | None = None
    step: int = 0
    steps: int | None = None
    host: str | None = None
    pid: int | None = None
    heartbeat_s: float | None = None
    mlflow_run_id: str | None = None
    mlflow_parent_id: str | None = None  # the run of the sweep that asked for this one

    def is_stale(self, now_s: float) -> bool:
        """It says that it runs, but its heart has stopped: the process was killed."""
        return self.state == "running" and now_s - (self.heartbeat_s or self.started_s) > STALE_AFTER_S


@dataclass(frozen=True)
class RunFolder:
    path: Path

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
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_steps(self) -> list[int]:
        names = (path.name.removeprefix(CHECKPOINT) for path in self.checkpoints.glob(f"{CHECKPOINT}*"))
        return sorted(int(step) for step in names if step.isdecimal())

    def artifacts(self) -> list[Path]:
        """Everything that says what this run was and found, its journal too; checkpoints stay where they are."""
        return sorted(path for pattern in ARTIFACTS for path in self.path.glob(pattern))

    @classmethod
    def create(
        cls, path: Path, config: schemas.Run, fingerprint: str, provenance: dict[str, Any], parent_id: str | None = None
    ) -> RunFolder:
        """A new run, queued. Raises ConfigError where there is one already."""
        folder = cls(path)
        path.mkdir(parents=True, exist_ok=True)
        with folder._status_lock():
            require(not folder.status_path.exists(), f"{path}: holds a run already")
            folder.config_path.write_text(yaml.dump(plain(config), Dumper=DUMPER, sort_keys=False))
            (path / "provenance.json").write_text(json.dumps(provenance, indent=2))
            folder._write(Status(fingerprint=fingerprint, started_s=time.time(), mlflow_parent_id=parent_id))
        return folder

    def go_on(self, config: schemas.Run, provenance: dict[str, Any]) -> None:
        """Before an unfinished run is resumed: the code may be another now, and what changes no number of it."""
        values = plain(config) | {"experiment": self.config().experiment}  # whose folder it is in
        replace_file(self.config_path, yaml.dump(values, Dumper=DUMPER, sort_keys=False))
        about = self.provenance()
        self.set_provenance(about | {"resumed": [*about.get("resumed", []), provenance]})

    def set_provenance(self, about: dict[str, Any]) -> None:
        replace_file(self.path / "provenance.json", json.dumps(about, indent=2))

    def config(self) -> schemas.AnyRun:
        try:
            return schemas.read_run(yaml.safe_load(self.config_path.read_text()))
        except (OSError, yaml.YAMLError, ConfigError) as error:
            raise ConfigError(f"{self.config_path}: {error}") from None

    def provenance(self) -> dict[str, Any]:
        return json.loads((self.path / "provenance.json").read_text())

    def backend(self) -> str | None:
        """Return the backends that its blocks ran on, each time that it was begun; None where nothing says."""
        about = self.provenance()
        return all_backends(part.get("backend") for part in (about, *about.get("resumed", [])))

    def status(self) -> Status:
        try:
            return read(Status, json.loads(self.status_path.read_text()))
        except (OSError, ValueError) as error:  # ConfigError is a ValueError
            raise ConfigError(
                f"{self.status_path}: cannot be read ({error}); move the folder away to train this run again"
            ) from None

    def update(self, **changes: Any) -> None:
        """Replaces fields of the status, all others kept, whoever else updates it in this moment."""
        with self._status_lock():
            self._write(dataclasses.replace(self.status(), **changes))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """This process is the run's one writer. Raises RunLocked; a killed holder's lock is gone with it."""
        path = self.path / "run.lock"
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = path.read_text() or "another process"
                raise RunLocked(f"{self.path}: is being written by {holder}; wait for it, or stop it") from None
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            yield
        finally:
            os.close(file)

    @contextmanager
    def heartbeat(self, every_s: float = 15.0) -> Iterator[None]:
        """Says whose heart it is, then refreshes `heartbeat_s`, and nothing else, for as long as the block runs."""
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

    @contextmanager
    def _status_lock(self) -> Iterator[None]:
        with (self.path / "status.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _write(self, status: Status) -> None:
        read(Status, dataclasses.asdict(status))  # a state that does not exist is refused here, not by the next reader
        replace_file(self.status_path, json.dumps(dataclasses.asdict(status), indent=2))


def replace_file(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def sync_file(path: Path) -> None:
    """What was written to a file, or renamed in a folder, survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_runs(runs_dir: Path, pattern: str = "*/*") -> list[RunFolder]:
    """All runs of all experiments, or those whose folder fits `pattern`; not those that were moved aside."""
    name = re.compile(f"[0-9a-f]{{{NAME_LENGTH}}}")
    paths = (status.parent for status in sorted(runs_dir.glob(f"{pattern}/status.json")))
    return [RunFolder(path) for path in paths if name.fullmatch(path.name)]


def find_run(runs_dir: Path, fingerprint_prefix: str) -> RunFolder | None:
    """The run of that fingerprint in whatever experiment, the newest if there are several.

    Raises ConfigError if the prefix fits more than one fingerprint.
    """
    name = fingerprint_prefix[:NAME_LENGTH]
    found = find_runs(runs_dir, f"*/{name}" if len(name) == NAME_LENGTH else f"*/{name}*")
    names = sorted({run.path.name for run in found})
    require(len(names) <= 1, f"{fingerprint_prefix}: could be any of {', '.join(names)}; give more digits")
    return max(found, key=lambda run: run.status().started_s, default=None)


def named_run(text: str, runs_dir: Path, key: str) -> RunFolder:
    """The run that `text` names: its folder, its fingerprint or the beginning of it, or an MLflow run id.

    Raises ConfigError, with the `key`, for what names none.
    """
    if (Path(text) / "status.json").is_file():
        return RunFolder(Path(text))
    runs = [run for run in find_runs(runs_dir) if is_called(run, text)]
    if not runs:
        raise ConfigError(
            f"{key}: {text!r} is no folder, and no run in {runs_dir}/ has such a fingerprint or MLflow run id"
        )
    names = sorted({run.status().fingerprint for run in runs})
    require(len(names) == 1, f"{key}: {text!r} could be any of {', '.join(name[:12] for name in names)}")
    return max(runs, key=lambda run: run.status().started_s)


def is_called(run: RunFolder, text: str) -> bool:
    status = run.status()
    begins = len(text) >= SHORTEST_PREFIX and status.fingerprint.startswith(text)
    return begins or status.mlflow_run_id == text
