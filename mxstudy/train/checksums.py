"""Checksums of the tensors in a checkpoint's safetensors files: recorded when it is written, compared when it is read.

A checksum is XXH3-128 of a tensor's bytes; `HEADER` is that of its file's header. It is taken from the tensor in
memory, so that it also tells whether the file holds what was to be written. With several ranks, each takes those of the
tensors that it wrote; `checked_reader` compares them.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from mxstudy.distributed import on_all_ranks

HEADER = ""  # in place of a tensor's name
THREADS = 8  # that read at the same time
Checksums = dict[str, dict[str, str]]  # {file: {tensor: checksum}}


class Piece(NamedTuple):
    """The bytes `start` to `stop` of a file: a tensor, or the header."""

    path: Path
    tensor: str
    start: int
    stop: int

    def checksum(self) -> str:
        if self.start == self.stop:
            return xxhash.xxh3_128_hexdigest(b"")
        with (
            self.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole,
            memoryview(whole) as view,
            view[self.start : self.stop] as own,
        ):
            return xxhash.xxh3_128_hexdigest(own)


def checksums_of(written: Mapping[Path, Mapping[str, Tensor]]) -> Checksums:
    """Return the checksums of all tensors in a checkpoint's files; all ranks must call it. Raises OSError.

    `written`: the files that this rank has written, with their tensors, which are on the CPU and contiguous.
    """
    parts = on_all_ranks(lambda: {path.name: own_checksums(path, tensors) for path, tensors in written.items()})
    return {file: checksums for part in parts for file, checksums in part.items()}


def own_checksums(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksums of a file's header and tensors."""
    header, *_ = pieces_of(path)
    with readers() as threads:
        found = zip(tensors, threads.map(checksum_in_memory, tensors.values()), strict=True)
        return {HEADER: header.checksum()} | dict(found)


def checksum_in_memory(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def readers() -> ThreadPoolExecutor:
    """Return a pool with a thread for each core, `THREADS` at most."""
    return ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))))


def pieces_of(path: Path) -> list[Piece]:
    """Return the places of the header and of each tensor in a safetensors file. Raises OSError for any other file."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(data - 8)) if data <= size else {}
        offsets = {name: about["data_offsets"] for name, about in header.items() if name != "__metadata__"}
        pieces = [Piece(path, name, data + start, data + stop) for name, (start, stop) in offsets.items()]
    except (ValueError, TypeError, KeyError) as error:
        raise OSError(f"{path.name} is no safetensors file ({error})") from None
    if not pieces or max(piece.stop for piece in pieces) != size:
        raise OSError(f"{path.name} is shorter or longer than its header says")
    return [Piece(path, HEADER, 0, data), *pieces]
