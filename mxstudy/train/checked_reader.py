"""Read a checkpoint's tensors and compare them with their recorded checksums in one pass over the memory.

Several threads read a tensor each, directly to its place, and compute the checksum of every chunk while it is in the
processor's cache, so no file is read a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from mxstudy.distributed import on_first_rank
from mxstudy.reader import ConfigError
from mxstudy.train.checksums import HEADER, Checksums, Piece, pieces_of, readers

CHUNK = 2**23  # bytes that stay in the cache; with smaller chunks the threads wait for Python and for each other


class ChangedBytes(ConfigError):
    """Raised for a file, and a tensor in it, whose bytes are not those that were written."""


class CheckedReader(HuggingFaceStorageReader):
    """Read safetensors files for torch.distributed.checkpoint. Raises ChangedBytes and OSError.

    The first rank compares the headers at once, and each rank later the tensors that it reads any part of.
    """

    def __init__(self, folder: Path, recorded: Checksums) -> None:
        super().__init__(str(folder))
        self.recorded = recorded
        self.pieces = on_first_rank(lambda: self.checked_pieces(folder))

    def checked_pieces(self, folder: Path) -> dict[tuple[str, str], Piece]:
        """Return the place of each tensor, by file and name."""
        pieces = {(p.path.name, p.tensor): p for file in sorted(folder.glob("*.safetensors")) for p in pieces_of(file)}
        for (_, tensor), piece in pieces.items():
            if tensor == HEADER:
                self.compare(piece, piece.checksum())
        return pieces

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def read(wanted: tuple[Piece, ReadItem]) -> str:
            return self.read_piece(*wanted, planner)

        items = sorted(((self.piece_of(item), item) for item in plan.items), key=lambda wanted: wanted[0])
        with readers() as threads:
            for (piece, _), checksum in zip(items, threads.map(read, items), strict=True):
                self.compare(piece, checksum)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def piece_of(self, item: ReadItem) -> Piece:
        path = Path(self.storage_data[item.storage_index].relative_path)
        return self.pieces[path.name, item.storage_index.fqn]

    def read_piece(self, piece: Piece, item: ReadItem, planner: LoadPlanner) -> str:
        """Read the wanted part of a tensor in a file, and return the checksum of the whole tensor."""
        target, stored = planner.resolve_tensor(item).detach(), self.storage_data[item.storage_index]
        if item.lengths == stored.shape and target.dtype == stored.dtype and target.is_contiguous():
            checksum = read_into(target, piece)
            planner.commit_tensor(item, target)
            return checksum
        with safe_open(piece.path, framework="pt") as file:  # a part of it
            self._process_read_request(file, item, planner)
        return piece.checksum()

    def compare(self, piece: Piece, checksum: str) -> None:
        if self.recorded.get(piece.path.name, {}).get(piece.tensor) != checksum:
            raise ChangedBytes(f"{piece.path.name}: {f'tensor {piece.tensor}' if piece.tensor else 'the header'}")


def read_into(target: Tensor, piece: Piece) -> str:
    """Read a whole tensor, and return its checksum."""
    checksum = xxhash.xxh3_128()
    with piece.path.open("rb", buffering=0) as file:
        file.seek(piece.start)
        for chunk, to in chunks_of(target):
            filled = 0
            while filled < len(chunk):
                count = file.readinto(chunk[filled:])
                if not count:
                    raise OSError(f"{piece.path.name} ends in tensor {piece.tensor}")
                filled += count
            checksum.update(chunk)
            if to is not None:
                to.copy_(torch.frombuffer(chunk, dtype=torch.uint8))
    return checksum.hexdigest()


def chunks_of(target: Tensor) -> Iterator[tuple[Any, Tensor | None]]:
    """Yield memory for each chunk of the tensor: its own, or a buffer and the bytes on the GPU to copy it to."""
    buffer = memoryview(bytearray(min(CHUNK, target.nbytes))) if target.is_cuda else None
    for part in target.reshape(-1).view(torch.uint8).split(CHUNK) if target.numel() else ():
        if buffer is None:
            yield memoryview(part.numpy()), None
        else:
            yield buffer[: part.numel()], part
