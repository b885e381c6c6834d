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
    """Copy the current mxstudy/, unless that copy exists, and return the folder to put first on PYTHONPATH.

    Raises ConfigError if there is other code in that folder, for example because somebody else has made it.
    """
    path = runs_dir.absolute() / NAME / f"code-{code_version()}"
    if path.exists():
        check_copy(path)
    else:
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            shutil.copytree(PACKAGE, temporary / "mxstudy", ignore=shutil.ignore_patterns("__pycache__"))
        except shutil.Error as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise ConfigError(f"runs_dir: the code cannot be copied to {path} ({error.args[0][0][2]})") from None
        temporary.rename(path)
    return path


def check_copy(path: Path) -> None:
    """Raise ConfigError if the folder holds anything but the code in its name. Delete what Python has compiled there.

    Python would run a compiled file without a look at its source.
    """
    for compiled in list(path.rglob("__pycache__")):
        moved = compiled.rename(path.with_name(f".compiled-{secrets.token_hex(8)}"))  # a job may be writing there
        shutil.rmtree(moved, ignore_errors=True)
    if [*path.iterdir()] != [path / "mxstudy"] or version_of(path / "mxstudy") != code_version():
        raise ConfigError(
            f"{path}: its content is not the code in its name; delete it once no job uses it, to have it made anew"
        )


@functools.cache  # the process keeps the code that it has loaded
def code_version() -> str:
    return version_of(PACKAGE)


def version_of(package: Path) -> str:
    """Return the first 12 digits of a sha256 over the names of all that is in a package, and the files' contents."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        name = path.relative_to(package)
        if "__pycache__" not in name.parts:
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def environment_of(code: Path) -> dict[str, str]:
    """Return the variables that make Python import the frozen code and no other copy of mxstudy."""
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([str(code), *rest]), "PYTHONSAFEPATH": "1"}
