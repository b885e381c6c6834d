"""Record where a run comes from: code, versions, machine."""

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
    """Return which code runs on which machine; it is recorded with a run, but is never part of its fingerprint."""
    commit, dirty = _commit()
    return {
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "mxstudy": _version("mxstudy"),
        "torch": str(torch.__version__),  # includes the build, such as +cu128, which the package's version may lack
        "torchao": _version("torchao"),
        "triton": _version("triton"),
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


@functools.cache  # what this process has loaded does not change
def _commit() -> tuple[str | None, bool | None]:
    """Return the commit of the repository that tracks this file, and whether there are uncommitted changes."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # fails inside another project's repository
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return None, None
