"""Provide the databases of an MLflow server: an SQLite file, or a PostgreSQL on this machine that can be killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

from mxstudy.launch.local import free_port
from mxstudy.tracking.mlflow_store import create_store

WRITE_VERSION = 18  # a byte of SQLite's header: above 2, the file may be read but not written (Database Header, 1.3.3)
DEBIAN = Path("/usr/lib/postgresql")  # has a folder for each version, none of them on the PATH
USER = "postgres"  # the user of Debian's package, because PostgreSQL does not run as root


class Databases(Protocol):
    """A maker of databases with MLflow's empty tables, which exist while the `with` block lasts."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def new(self, name: str) -> str:
        """Make a database of that name, and return its URI."""

    def kill(self) -> None:
        """Kill the process that serves the databases with SIGKILL, if there is one."""

    def start(self) -> None:
        """Start that process again."""


class SQLite:
    def __init__(self, folder: Path) -> None:
        self.folder, self.empty = folder, folder / "empty.db"

    def __enter__(self) -> Self:
        made(f"sqlite:///{self.empty}")
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing, because an SQLite file has no process."""

    def new(self, name: str) -> str:
        return f"sqlite:///{shutil.copy(self.empty, self.folder / f'{name}.db')}"

    def kill(self) -> None:
        """Do nothing, because an SQLite file has no process."""

    def start(self) -> None:
        """Do nothing, because an SQLite file has no process."""


class PostgreSQL:
    """A PostgreSQL on a free port of 127.0.0.1, with its data in a temporary folder that its user can reach."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, Path()
        self.user = USER if os.geteuid() == 0 else None
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def __enter__(self) -> Self:
        self.data = Path(tempfile.mkdtemp(prefix="postgresql-", dir="/tmp"))
        if self.user:
            shutil.chown(self.data, self.user)
        self._run("initdb", "--auth=trust", f"--username={USER}", "--encoding=UTF8", "--no-sync", str(self.data))
        self.start()
        self._sql("CREATE DATABASE empty")
        made(self.uri("empty"))
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        shutil.rmtree(self.data)

    def uri(self, name: str) -> str:
        return f"postgresql+psycopg://{USER}@127.0.0.1:{self.port}/{name}"

    def new(self, name: str) -> str:
        self._sql(f"CREATE DATABASE {name} TEMPLATE empty")
        return self.uri(name)

    def start(self) -> None:
        """Start it and wait until it answers. Raises CalledProcessError after 60 s."""
        options = ["-h", "127.0.0.1", "-p", str(self.port), "-k", str(self.data)]
        with (self.folder / "postgresql.log").open("a") as log:
            command = [program("postgres"), "-D", str(self.data), *options]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, user=self.user, cwd=self.data
            )
        for left in reversed(range(300)):
            done = subprocess.run([program("pg_isready"), *options[:4], "--timeout=1", "--quiet"], check=not left)
            if done.returncode == 0:
                return
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.2)

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _sql(self, line: str) -> None:
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", "postgres"]
        self._run("psql", *where, "--quiet", "-c", line)

    def _run(self, name: str, *arguments: str) -> None:
        command = [program(name), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, user=self.user, cwd=self.data)


def program(name: str) -> str:
    """Return the path of a program of the newest PostgreSQL here. Raises FileNotFoundError."""
    found = sorted(DEBIAN.glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]))
    path = str(found[-1]) if found else shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"no PostgreSQL here ({name}): apt-get install --no-install-recommends postgresql")
    return path


def made(uri: str) -> None:
    """Fill a new database with MLflow's tables. Raises RuntimeError."""
    if problem := create_store(uri):
        raise RuntimeError(problem)


def make_writable(database: Path, writable: bool) -> None:
    """Make an SQLite file writable or read-only. Processes notice it when they next open the file.

    This sets SQLite's header, because root can write to a file whatever its mode.
    """
    with database.open("r+b") as file:
        file.seek(WRITE_VERSION)
        file.write(bytes([1 if writable else 3]))
