"""Check, when a run is planned, that the folders which it will write to are there or can be made."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from mxstudy.reader import ConfigError, one_line, require

FULL = (errno.ENOSPC, errno.EDQUOT)  # what is skipped needs no room, and there may be some when a job starts


def check_folder(key: str, path: Path) -> None:
    """Raise ConfigError, naming the config key, unless that folder can be written to, or made.

    It is tried, by a folder that is removed at once: in /proc everybody may write, and nobody can.
    """
    found = path.absolute()
    try:
        while not found.exists():
            found = found.parent
    except OSError as error:
        raise ConfigError(f"{key}: {one_line(error)[:200]}; give another folder") from None
    require(found.is_dir(), f"{key}: {found} is a file; give a folder")
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".", dir=found))
    except OSError as error:
        advice = "give one that this user may write to"
        require(error.errno in FULL, f"{key}: no folder can be made in {found} ({error.strerror}); {advice}")
