"""Drop files from the system's page cache, so that they are read from the disk."""

from __future__ import annotations

import os
from pathlib import Path


def forget(folder: Path) -> None:
    """Flush the folder's files to the disk, and drop them from the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
