"""Check, when a run is planned, that the folders it will write to exist or can be made."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from mxstudy.reader import ConfigError, one_line, require

FULL = (errno.ENOSPC, errno.EDQUOT)  # a skipped run needs no room, and there may be room when a job starts


def check_folder(key: str, path: Path) -> None:
    """Raise ConfigError, naming the config key, unless that folder can be written to, or made.

    The check makes a folder and removes it at once, because permissions do not tell: /proc allows writing, and refuses
    it.
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
