"""The columnar journal of a stack: loss and gradient norm of every step and replica, in Parquet files.

    columns/steps_00000500.parquet      one row per step from 500 on: loss and grad_norm, lists of S float32

The files cover all steps from 0 without a gap. Each file is synced under a temporary name, then renamed, so that it is
complete or absent; a kill loses only what was not flushed. Pages carry checksums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mxstudy.reader import ConfigError
from mxstudy.tracking.folder import checkpoints_in, step_of
from mxstudy.whole_files import replacing

PREFIX = "steps_"
NAMES = ("loss", "grad_norm")
ROWS = 500  # largest number of steps kept in memory


class ColumnsError(ConfigError):
    """A columnar journal that cannot be read, or lacks steps."""


class Columns:
    """A writer that appends steps; it first deletes the steps from `start` on that are already there.

    Raises ColumnsError if steps before `start` are missing or cannot be read; it names the checkpoint before them.
    """

    def __init__(self, folder: Path, replicas: int, start: int) -> None:
        self.folder, self.replicas = folder, replicas
        folder.mkdir(exist_ok=True)
        for partial in folder.glob(f".{PREFIX}*"):
            partial.unlink()  # a killed process was writing it
        supersede(folder, replicas, start)
        self.flushed, self.pending = start, np.empty((0, len(NAMES), replicas), np.float32)

    def append(self, values: np.ndarray) -> None:
        """Append the next steps, float32 [steps, len(NAMES), S]; they are written once there are ROWS of them."""
        self.pending = np.concatenate((self.pending, values))
        if len(self.pending) >= ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the pending steps and make them durable."""
        if len(self.pending):
            write_part(part_path(self.folder, self.flushed), self.pending)
            self.flushed, self.pending = self.flushed + len(self.pending), self.pending[:0]


def read_columns(folder: Path, replicas: int) -> np.ndarray:
    """Return all steps from 0 on: float32 [steps, len(NAMES), S].

    Raises ColumnsError if a file is truncated or corrupt, steps are missing, or the number of replicas differs.
    """
    parts = [values for _, values in read_parts(sorted(folder.glob(f"{PREFIX}*")), replicas)]
    return np.concatenate([np.empty((0, len(NAMES), replicas), np.float32), *parts])


def supersede(folder: Path, replicas: int, start: int) -> None:
    """Delete the steps from `start` on, last file first, so that a kill leaves no gap."""
    paths = sorted(folder.glob(f"{PREFIX}*"))
    for path in reversed([path for path in paths if first_step(path) >= start]):
        path.unlink()
    end = 0
    try:
        for path, values in read_parts([path for path in paths if first_step(path) < start], replicas):
            end = first_step(path) + len(values)
            if end > start:
                write_part(path, values[: start - end])
        if end < start:
            raise ColumnsError(f"{folder}: steps {end} to {start - 1} are missing; rerun=true trains them again")
    except ColumnsError as error:
        raise ColumnsError(f"{error}{way_back(folder.parent / 'checkpoints', end)}") from error


def way_back(checkpoints: Path, end: int) -> str:
    """Return how a run of which the steps from `end` on are lost goes on without rerun=true, or "" if it cannot."""
    reached = [path.name for path in checkpoints_in(checkpoints) if step_of(path) <= end]
    return f"; to go on from {reached[-1]}, delete the folders of later steps in {checkpoints}" if reached else ""


def read_parts(paths: Sequence[Path], replicas: int) -> Iterator[tuple[Path, np.ndarray]]:
    end = 0
    for path in paths:
        if first_step(path) != end:
            raise ColumnsError(
                f"{path}: steps {end} to {first_step(path) - 1} before it are missing; rerun=true trains them again"
            )
        values = read_part(path)
        if values.shape[-1] != replicas:
            raise ColumnsError(f"{path}: has {values.shape[-1]} replicas, not {replicas}")
        yield path, values
        end += len(values)


def part_path(folder: Path, start: int) -> Path:
    return folder / f"{PREFIX}{start:08d}.parquet"


def first_step(path: Path) -> int:
    return int(path.stem.removeprefix(PREFIX))


def write_part(path: Path, values: np.ndarray) -> None:
    """Write float32 [steps, len(NAMES), S] atomically and durably."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lists = [
        pa.FixedSizeListArray.from_arrays(pa.array(column.ravel()), column.shape[-1]) for column in swapped(values)
    ]
    table = pa.Table.from_arrays(lists, names=list(NAMES))
    how = {"compression": "zstd", "use_dictionary": False, "use_byte_stream_split": True, "write_page_checksum": True}
    with replacing(path) as temporary:
        pq.write_table(table, temporary, **how)


def read_part(path: Path) -> np.ndarray:
    """Return the steps that `write_part` wrote: float32 [steps, len(NAMES), S]."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=list(NAMES), page_checksum_verification=True)
        columns = [table[name].combine_chunks() for name in NAMES]
        return swapped(np.stack([c.values.to_numpy().reshape(len(c), c.type.list_size) for c in columns]))
    except (pa.ArrowException, OSError, KeyError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0]
        raise ColumnsError(f"{path}: truncated or corrupt ({reason}); rerun=true trains the run again") from error


def swapped(values: np.ndarray) -> np.ndarray:
    """Return [steps, names, S] as contiguous [names, steps, S], or the reverse."""
    return np.ascontiguousarray(values.swapaxes(0, 1))
