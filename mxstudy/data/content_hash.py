"""sha256 of texts and of files: what tells duplicates, sides of the split, and whether a file is what it was."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Literal

import numpy as np

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
DIGEST_BYTES = 32


def digest_of(text: str) -> bytes:
    """sha256 of the text as UTF-8: what tells duplicates, and on which side of the split a document is."""
    return hashlib.sha256(text.encode()).digest()


def split_of(text: str, validation_fraction: float) -> Split:
    """The side of the split: the same wherever the text turns up, whatever else the corpus holds."""
    (held_out,) = for_validation(digest_of(text), validation_fraction)
    return "validation" if held_out else "train"


def for_validation(digests: bytes, validation_fraction: float) -> np.ndarray:
    """Which of n digests, one after the other, are on that side; bool [n].

    `digest_of` a text is uniform over its 256-bit values; the lowest fraction of them is for validation.
    """
    first_8_bytes = np.frombuffer(digests, ">u8").reshape(-1, DIGEST_BYTES // 8)[:, 0]
    return first_8_bytes / 2**64 < validation_fraction


def sha256_of(path: Path) -> str:
    """sha256 of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """`sha256_of`, which a process does not ask for again while the file keeps its size and time."""
    stat = path.stat()
    return _sha256_once(path, stat.st_size, stat.st_mtime_ns)


@functools.cache
def _sha256_once(path: Path, size: int, modified_ns: int) -> str:
    return sha256_of(path)
