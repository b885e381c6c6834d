"""What a launch leaves in RUNS_DIR/.launch, so that its jobs run what was there when they were submitted.

code-HASH/mxstudy/     the code, once for all launches that have the same
20261121-181759-3f2a/  a launch: logs of its jobs, and what its queue needs
"""

from __future__ import annotations

import fcntl
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

PACKAGE = Path(mxstudy.__file__).parent
NAME = ".launch"


def new_launch(runs_dir: Path) -> Path:
    """An empty folder for a launch; absolute, for its jobs start elsewhere."""
    path = runs_dir.absolute() / NAME / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    path.mkdir(parents=True)
    return path


@contextmanager
def one_at_a_time(runs_dir: Path) -> Iterator[None]:
    """Two launches never submit the same run: one waits until the other has."""
    folder = runs_dir / NAME
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def freeze_code(runs_dir: Path) -> Path:
    """The folder to put first on PYTHONPATH: a copy of mxstudy/ as it is now."""
    path = runs_dir.absolute() / NAME / f"code-{code_version()}"
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        shutil.copytree(PACKAGE, temporary / "mxstudy", ignore=shutil.ignore_patterns("__pycache__"))
        temporary.rename(path)
    return path


@functools.cache  # of the code that this process has loaded
def code_version() -> str:
    """The first digits of a sha256 over every file of mxstudy/, names included."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def environment_of(code: Path) -> dict[str, str]:
    """Variables with which Python takes the frozen code, and not what is in the working directory or installed."""
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([str(code), *rest]), "PYTHONSAFEPATH": "1"}
