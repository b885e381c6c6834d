"""Write files so that a crash, a signal or a full disk leaves the old file or the new one, never a part."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mxstudy.reader import ConfigError, one_line, require


def check_folder(key: str, path: Path) -> None:
    """Raise ConfigError, naming the config key, unless that folder is there to be written to or can be made."""
    found = path.absolute()
    try:
        while not found.exists():
            found = found.parent
    except OSError as error:
        raise ConfigError(f"{key}: {one_line(error)[:200]}; give another folder") from None
    require(found.is_dir(), f"{key}: {found} is a file; give a folder")
    can_write = os.access(found, os.W_OK | os.X_OK)
    require(can_write, f"{key}: no folder can be made in {found}; give one that this user may write to")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what the block writes there takes its place, flushed to disk.

    If the block raises, `path` stays as it was, and the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_file(path.parent)


def replace_file(path: Path, text: str) -> None:
    """Replace a file's text, or create the file."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync_file(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
