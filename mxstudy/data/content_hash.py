"""sha256 of texts and files, to find duplicates, to split the corpus, and to see whether a file has changed."""

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
    """Return the sha256 of the text as UTF-8, 32 bytes; it identifies duplicates and decides the split."""
    return hashlib.sha256(text.encode()).digest()


def split_of(text: str, validation_fraction: float) -> Split:
    """Return the split of a text; it depends on the text and the fraction only, not on the rest of the corpus."""
    (held_out,) = for_validation(digest_of(text), validation_fraction)
    return "validation" if held_out else "train"


def for_validation(digests: bytes, validation_fraction: float) -> np.ndarray:
    """Return which of n concatenated digests belong to the validation split; bool [n].

    `digest_of` is uniform over 256-bit values; the lowest `validation_fraction` of them is for validation.
    """
    first_8_bytes = np.frombuffer(digests, ">u8").reshape(-1, DIGEST_BYTES // 8)[:, 0]
    return first_8_bytes / 2**64 < validation_fraction


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_once(path: Path) -> str:
    """Return `sha256_of`, computed once per process while the file keeps its size and modification time."""
    stat = path.stat()
    return _sha256_once(path, stat.st_size, stat.st_mtime_ns)


@functools.cache
def _sha256_once(path: Path, size: int, modified_ns: int) -> str:
    return sha256_of(path)
