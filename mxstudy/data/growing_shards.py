"""Shards under construction: token files that only grow, and a state file that says how much of them is valid.

    <key>.partial/  train-00000.bin ..., validation-00000.bin ...    token ids
                    seen.bin      the sha256 of every text that was read, 32 bytes each
                    state.json    how far the corpus has been read, counts, size and sha256 of each file

What a killed process wrote after its last state is cut off; the rest must have the sha256 that the state records.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mxstudy.data.content_hash import DIGEST_BYTES, SPLITS, Split, for_validation
from mxstudy.data.corpus import SourceLocation
from mxstudy.data.duplicates import DigestSet
from mxstudy.data.encode import Encoded
from mxstudy.reader import require
from mxstudy.small_files import read_json
from mxstudy.whole_files import replace_file

SEEN = "seen.bin"
STATE = "state.json"
MANIFEST = "manifest.json"
READ_AT_ONCE = 2**24  # bytes

Counts = dict[Split, dict[str, int]]  # split -> tokens, documents, duplicates, bytes


class File:
    """A file that only grows, with the sha256 of what it holds."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Open a file, keeping its first `size` bytes; a size of 0 creates it anew. Raises OSError."""
        self.path, self.size, self.hash = path, size, hashlib.sha256()
        self.file: BinaryIO | None = None  # open from the first append until close
        with path.open("r+b" if size else "w+b") as file:
            file.truncate(size)
            while content := file.read(READ_AT_ONCE):
                self.hash.update(content)

    def append(self, content: bytes | memoryview) -> None:
        self.file = self.file or self.path.open("ab")
        self.file.write(content)
        self.hash.update(content)
        self.size += len(content)

    def sync(self) -> None:
        if self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.sync()
        if self.file:
            self.file.close()
        self.file = None

    def entry(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.hash.hexdigest()}


class Partial:
    """Shards under construction in `folder`: new, or continued from the state that a killed process left.

    `parts`: names of the corpus's parts, which must not change in between. `location`, `counts`, `seconds`: how far the
    corpus has been read, counts and time so far. Raises ConfigError if a file does not match the state.
    """

    def __init__(self, folder: Path, parts: Sequence[str], max_file_bytes: int) -> None:
        self.folder, self.max_file_bytes = folder, max_file_bytes
        self.parts = hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()
        self.location, self.counts, self.seconds = SourceLocation(), no_counts(), 0.0
        self.files: dict[str, File] = {}
        self.seen = DigestSet()
        state: dict[str, Any] = {"files": {}}
        if (folder / STATE).exists():
            state = read_json(folder / STATE, f"delete {folder} to begin again")
        for path in folder.iterdir():
            if path.name not in ("tokenizer.json", STATE, *state["files"]):
                path.unlink()
        if state["files"]:
            self.go_on(state)
        else:
            self.files[SEEN] = File(folder / SEEN)

    def go_on(self, state: dict[str, Any]) -> None:
        """Continue from a state: cut every file to its length there, check it, and read the digests of known texts."""
        start_again = f"delete {self.folder} to begin again"
        require(
            state["parts"] == self.parts,
            f"data: the files of the corpus are not those that {self.folder} was begun with; {start_again}. For a data "
            "set on the hub, set data.revision to a commit, which does not change",
        )
        for name, entry in state["files"].items():
            path = self.folder / name
            size = path.stat().st_size if path.exists() else 0
            require(size >= entry["bytes"], f"{path}: {size} bytes, not {entry['bytes']}; {start_again}")
        with ThreadPoolExecutor() as pool:
            files = pool.map(lambda name: File(self.folder / name, state["files"][name]["bytes"]), state["files"])
            self.files = dict(zip(state["files"], files, strict=True))
        for name, entry in state["files"].items():
            require(
                self.files[name].entry() == entry,
                f"{self.folder / name}: its sha256 is not the one recorded when it was written; {start_again}",
            )
        self.location, self.counts, self.seconds = SourceLocation(*state["place"]), state["counts"], state["seconds"]
        with (self.folder / SEEN).open("rb") as digests:
            while content := digests.read(2**16 * DIGEST_BYTES):
                self.seen.add(content)

    def add(self, encoded: Encoded, validation_fraction: float) -> None:
        """Append the documents of a batch that were not seen before, each to the end of its split."""
        self.files[SEEN].append(encoded.digests)
        new = self.seen.add(encoded.digests)
        by_hash = encoded.held_out is None
        held_out = for_validation(encoded.digests, validation_fraction) if by_hash else np.array(encoded.held_out, bool)
        for split in SPLITS:
            chosen = held_out == (split == "validation")
            count, kept = self.counts[split], chosen & new
            count["documents"] += int(kept.sum())
            count["duplicates"] += int((chosen & ~new).sum())
            count["bytes"] += int(encoded.sizes[kept].sum())
            self.append(encoded.ids[np.repeat(kept, encoded.lengths)], split)
        self.location = encoded.location

    def append(self, ids: np.ndarray, split: Split) -> None:
        """Append ids to the split's last file, continuing in a new file when it is full."""
        content = memoryview(ids.tobytes())
        while content:
            index, used = divmod(self.counts[split]["tokens"] * ids.itemsize, self.max_file_bytes)
            name = f"{split}-{index:05d}.bin"
            if name not in self.files:
                self.files[name] = File(self.folder / name)
            part, content = content[: self.max_file_bytes - used], content[self.max_file_bytes - used :]
            self.files[name].append(part)
            self.counts[split]["tokens"] += len(part) // ids.itemsize
            if used + len(part) == self.max_file_bytes:
                self.files[name].close()

    def note(self, seconds: float) -> None:
        """Make what was written durable, then write the state. `seconds`: time spent since the last call."""
        for file in self.files.values():
            file.sync()
        self.seconds += seconds
        state = {"parts": self.parts, "place": self.location, "counts": self.counts, "seconds": self.seconds}
        replace_file(self.folder / STATE, json.dumps(state | {"files": self.entries()}, indent=1))

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return size and sha256 of each file, by name."""
        return {name: file.entry() for name, file in sorted(self.files.items())}

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, which marks the shards as complete, and remove the files used to build them."""
        for file in self.files.values():
            file.close()
        replace_file(self.folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        clear(self.folder)


def clear(folder: Path) -> bool:
    """Return whether the shards in `folder` are complete; if so, remove the files used to build them."""
    complete = (folder / MANIFEST).exists()
    for name in (STATE, SEEN) if complete else ():
        (folder / name).unlink(missing_ok=True)
    return complete


def no_counts() -> Counts:
    return {split: dict.fromkeys(("tokens", "documents", "duplicates", "bytes"), 0) for split in SPLITS}
