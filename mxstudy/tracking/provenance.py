"""Where a run comes from: code, versions, machine."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    """Which code runs, on what: recorded with a run, and never part of its fingerprint."""
    commit, dirty = _commit()
    return {
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "mxstudy": _version("mxstudy"),
        "torch": str(torch.__version__),  # with what it was built for, which the package's version may lack
        "torchao": _version("torchao"),
        "host": socket.gethostname(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": shlex.join(sys.orig_argv),
    }


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache  # of the code that this process has loaded
def _commit() -> tuple[str | None, bool | None]:
    """Commit of the repository that tracks this file, and whether anything in it has changed since."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # else it is installed inside somebody else's repository
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return None, None
