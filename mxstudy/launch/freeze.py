"""The files that a launch writes to RUNS_DIR/.launch, so that its jobs run the code that they were submitted with.

code-HASH/mxstudy/     a copy of the code, shared by all launches with the same code
20261121-181759-3f2a/  a launch: the logs of its jobs, and the files of its queue
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mxstudy
from mxstudy.reader import ConfigError, one_line
from mxstudy.studies.folders import FULL
from mxstudy.tracking.locks import waiting_lock

PACKAGE = Path(mxstudy.__file__).parent
NAME = ".launch"


def new_launch(runs_dir: Path) -> Path:
    """Make an empty folder for a launch, and return its absolute path, because its jobs start in other directories."""
    path = runs_dir.absolute() / NAME / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    path.mkdir(parents=True)
    return path


@contextmanager
def one_at_a_time(runs_dir: Path) -> Iterator[None]:
    """Hold the lock of RUNS_DIR, so that two launches never submit the same run: the second waits for the first.

    Raises ConfigError with that key if there is no room, because an error of writing names no file.
    """
    folder = runs_dir / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with waiting_lock(folder / "lock"):
            yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        why = f"cannot write to {runs_dir} ({one_line(error)}); make room, or give another"
        raise ConfigError(f"runs_dir: {why}") from None


def freeze_code(runs_dir: Path) -> Path:
    """Copy the current mxstudy/, unless that copy exists, and return the folder to put first on PYTHONPATH."""
    path = runs_dir.absolute() / NAME / f"code-{code_version()}"
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            shutil.copytree(PACKAGE, temporary / "mxstudy", ignore=shutil.ignore_patterns("__pycache__"))
        except shutil.Error as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise ConfigError(f"runs_dir: the code cannot be copied to {path} ({error.args[0][0][2]})") from None
        temporary.rename(path)
    return path


@functools.cache  # the process keeps the code that it has loaded
def code_version() -> str:
    """Return the first 12 digits of a sha256 over the names and contents of all files of mxstudy/."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def environment_of(code: Path) -> dict[str, str]:
    """Return the variables that make Python import the frozen code and no other copy of mxstudy."""
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([str(code), *rest]), "PYTHONSAFEPATH": "1"}
