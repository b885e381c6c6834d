"""Rows of evaluation sets: from a local folder, or from the Hugging Face hub."""

from __future__ import annotations

import functools
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq

from mxstudy.data.content_hash import sha256_once
from mxstudy.data.files import parse
from mxstudy.reader import ConfigError, require

Rows = list[dict[str, Any]]
SHOTS = "shots"  # the split of a user's solved examples, which no hub has


class DataMissing(ConfigError):
    """Rows that are neither in the folder nor to be had from the hub."""


def load_rows(name: str, path: str, subset: str | None, split: str, folder: Path | None) -> Rows:
    """The rows of one split, in their order.

    `folder`: holds NAME.SPLIT*.jsonl, .jsonl.gz or .parquet in the columns of the hub's data set; None: from the hub,
    `path` and `subset`. Raises DataMissing for what is not there, with the command that fetches it, and ConfigError,
    with the place, for a file that cannot be read or has no rows.
    """
    if folder is None:
        return from_hub(name, path, subset, split)
    file, option = file_of(name, split, folder), option_of(split)
    try:
        rows = list(READERS[reader_of(file)](file, option))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, pyarrow.ArrowException) as error:
        raise ConfigError(f"{option}: {file} cannot be read: {error}") from error
    require(bool(rows), f"{option}: {file} has no rows")
    return rows


def identity(name: str, path: str, subset: str | None, split: str, folder: Path | None) -> dict[str, Any]:
    """What names these rows in a fingerprint: the file's sha256, or the data set on the hub."""
    if folder is None:
        return {"hub": [path, subset, split]}
    return {"sha256": sha256_once(file_of(name, split, folder))}


def option_of(split: str) -> str:
    """Which key names the folder of those rows."""
    return "evaluation.shots_dir" if split == SHOTS else "evaluation.data_dir"


def place_of(name: str, path: str, split: str, folder: Path | None) -> str:
    """Where these rows are, for a message about one of them."""
    return f"{option_of(split)}: {path if folder is None else file_of(name, split, folder)}"


def file_of(name: str, split: str, folder: Path) -> Path:
    option = option_of(split)
    require(folder.is_dir(), f"{option}: {folder} is no folder")
    found = [file for file in sorted(folder.glob(f"{name}.{split}*")) if reader_of(file)]
    if not found:
        hub = "" if split == SHOTS else "; without data_dir the rows come from the Hugging Face hub"
        raise DataMissing(f"{option}: {folder} has no {name}.{split}*.jsonl, .jsonl.gz or .parquet{hub}")
    require(len(found) == 1, f"{option}: {folder} has more than one {name}.{split}: {', '.join(map(str, found))}")
    return found[0]


def reader_of(file: Path) -> str:
    return next((suffix for suffix in READERS if file.name.endswith(suffix)), "")


def json_lines(file: Path, option: str) -> Iterator[dict[str, Any]]:
    """A row is a line that is not blank."""
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                yield parse(line, f"{file}, line {number}", option)


def parquet(file: Path, option: str) -> Iterator[dict[str, Any]]:
    yield from pq.read_table(file).to_pylist()


READERS = {".jsonl": json_lines, ".jsonl.gz": json_lines, ".parquet": parquet}


@functools.cache  # an evaluation asks for them as it is checked, named and run
def from_hub(name: str, path: str, subset: str | None, split: str) -> Rows:
    import datasets

    datasets.disable_progress_bars()
    try:
        return list(datasets.load_dataset(path, subset, split=split))
    except Exception as error:  # of the network, the hub, or the library
        fetch = f"hf download --repo-type dataset {path}"
        raise DataMissing(
            f"{name}: the data set {path} cannot be had ({type(error).__name__}); `{fetch}` fetches it, or "
            "evaluation.data_dir= names a folder that has it"
        ) from error
