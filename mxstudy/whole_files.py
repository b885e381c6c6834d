"""Write files so that a crash, a signal or a full disk leaves the old file or the new one, never a part."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; the file that the block writes there replaces `path`, flushed to disk.

    If the block raises, `path` stays as it was, and the temporary file is removed.
    """
    with _renaming(path) as temporary:
        yield temporary
    sync_file(path.parent)


@contextmanager
def _renaming(path: Path) -> Iterator[Path]:
    """Do what `replacing` does, but leave it to the caller to flush the folder, which holds the file's name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_file(path: Path, text: str) -> None:
    """Replace a file's text, or create the file."""
    replace_files(path.parent, {path.name: text})


def replace_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Replace or create files of one folder, by their names and in this order; flush the folder once, at the end."""
    for name, text in texts.items():
        with _renaming(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Make the contents of a file, or a rename in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
