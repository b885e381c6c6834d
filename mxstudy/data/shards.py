"""Shards: a corpus tokenised once into memory-mapped files, with a manifest that says what they hold.

    <cache_dir>/shards/<key>/  train-00000.bin ..., validation-00000.bin ...    token ids, little-endian
                               tokenizer.json
                               manifest.json    counts, sha256 of every file, identities of corpus and tokenizer

The key is a hash of everything that determines the tokens. Documents are in corpus order, each followed by EOS;
repeated texts are dropped; the hash of a text decides its split.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxstudy import config
from mxstudy.config import SCHEMA_VERSION, hashed
from mxstudy.data import corpus
from mxstudy.data import tokenizer as tokenization
from mxstudy.data.build_shards import How, OnCounts, Report, build, ignore_counts
from mxstudy.data.content_hash import Split, sha256_of
from mxstudy.data.tokenizer import Tokenizer
from mxstudy.reader import require
from mxstudy.small_files import read_json

SHARDS_VERSION = 1  # must be raised when the same origin would give different files
CHUNK_TOKENS = 2**24  # tokens counted at a time


@dataclass(frozen=True)
class Shards:
    """Prepared token files, opened by `prepare`. Building them again gives the same manifest, key for key."""

    folder: Path
    manifest: dict[str, Any]

    def tokens(self, split: Split) -> Tokens:
        """Return the split's token ids, memory-mapped: uint16 if all ids fit, else uint32."""
        names = sorted(name for name in self.manifest["files"] if name.startswith(f"{split}-"))
        return Tokens([self.folder / name for name in names], np.dtype(self.manifest["dtype"]))

    def tokenizer(self) -> Tokenizer:
        return tokenization.open_tokenizer(self.folder / "tokenizer.json", self.manifest["tokenizer"]["eos_token"])

    def unigram_frequencies(self, split: Split) -> np.ndarray:
        """Return how frequent each token id is in a split, float64 [vocabulary]. Raises ConfigError if it is empty."""
        counts = np.zeros(self.manifest["tokenizer"]["vocab_size"], dtype=np.int64)
        for file in self.tokens(split).files:
            for start in range(0, len(file), CHUNK_TOKENS):
                counts += np.bincount(file[start : start + CHUNK_TOKENS], minlength=len(counts))
        require(bool(counts.any()), f"data.validation_fraction: the {split} split is empty")
        return counts / counts.sum()


class Tokens:
    """The token ids of one split, concatenated over its files: `tokens[start:stop]` is a 1-d array."""

    def __init__(self, paths: list[Path], dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.files = [np.memmap(path, dtype, mode="r") for path in paths]
        self.offsets = list(itertools.accumulate((len(file) for file in self.files), initial=0))

    def __len__(self) -> int:
        return self.offsets[-1]

    def __getitem__(self, window: slice) -> np.ndarray:
        start, stop, _ = window.indices(len(self))
        touched = range(bisect_right(self.offsets, start) - 1, bisect_left(self.offsets, stop))
        parts = [self.files[i][max(start - self.offsets[i], 0) : stop - self.offsets[i]] for i in touched]
        return np.concatenate([np.empty(0, self.dtype), *parts])


def locate(data: config.Data, tokenizer: config.Tokenizer, cache_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the shards, whether it exists or not, and everything that determines their tokens."""
    origin = {
        "version": [SHARDS_VERSION, SCHEMA_VERSION],
        "data": hashed(data),
        "corpus": corpus.identity(data),
        "tokenizer": tokenization.identity(tokenizer),
    }
    key = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cache_dir) / "shards" / key, origin


def prepare(
    data: config.Data,
    tokenizer: config.Tokenizer,
    cache_dir: Path,
    report: Report,
    workers: int = 0,
    on_counts: OnCounts = ignore_counts,
) -> Shards:
    """Return the shards of a corpus under a tokenizer: built on the first call, opened on every later one.

    Safe to call from several processes at once and to kill at any moment: the shards are built in a temporary folder
    under a lock, which is renamed when complete; the next call continues the work. `report` receives lines of
    progress; `workers` and `on_counts` are those of `How`. Raises ConfigError if the corpus or the tokenizer cannot be
    read, or if the corpus has no training text.
    """
    folder, origin = locate(data, tokenizer, cache_dir)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.with_suffix(".lock"), report):
            if not folder.exists():
                partial = folder.with_suffix(".partial")
                build(data, tokenizer, origin, partial, How(report, workers, on_counts))
                partial.rename(folder)
    return open_shards(folder)


def open_shards(folder: Path) -> Shards:
    """Open prepared shards. Raises ConfigError for a file that is missing, unreadable or not as large as recorded."""
    path = folder / "manifest.json"
    manifest = read_json(path, remedy(folder))
    for name, entry in manifest["files"].items():
        file = folder / name
        require(file.is_file(), f"{file}: missing; {remedy(folder)}")
        size = file.stat().st_size
        require(size == entry["bytes"], f"{file}: {size} bytes, not the manifest's {entry['bytes']}; {remedy(folder)}")
    return Shards(folder, manifest)


def verify(shards: Shards) -> None:
    """Compare the sha256 of every file with the manifest. Raises ConfigError naming a file that differs."""
    manifest = open_shards(shards.folder).manifest
    require(manifest == shards.manifest, f"{shards.folder / 'manifest.json'}: changed since it was opened")
    paths = [shards.folder / name for name in manifest["files"]]
    with ThreadPoolExecutor() as pool:
        for path, digest in zip(paths, pool.map(sha256_of, paths), strict=True):
            same = digest == manifest["files"][path.name]["sha256"]
            require(same, f"{path}: its sha256 is not the manifest's; {remedy(path.parent)}")


def remedy(folder: Path) -> str:
    return f"delete {folder} to have it prepared again"


@contextmanager
def exclusive(path: Path, report: Report) -> Iterator[None]:
    """Hold an exclusive lock on a file; the operating system releases it when the process ends for any reason."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another process that is preparing {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
