"""Rows of evaluation sets: from a local folder, or from the Hugging Face hub."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mxstudy.data.hashes import sha256_once
from mxstudy.reader import ConfigError, require

Rows = list[dict[str, Any]]
SHOTS = "shots"  # the split of a user's solved examples, which no hub has


class DataMissing(ConfigError):
    """Rows that are neither in the folder nor to be had from the hub."""


def load_rows(name: str, path: str, subset: str | None, split: str, folder: Path | None) -> Rows:
    """The rows of one split, in their order.

    `folder`: holds NAME.SPLIT*.jsonl, .jsonl.gz or .parquet in the columns of the hub's data set; None: from the hub,
    `path` and `subset`. Raises DataMissing for what is not there, with the command that fetches it.
    """
    if folder is None:
        return from_hub(name, path, subset, split)
    file = file_of(name, split, folder)
    return list(READERS[reader_of(file)](file))


def identity(name: str, path: str, subset: str | None, split: str, folder: Path | None) -> dict[str, Any]:
    """What names these rows in a fingerprint: the file's sha256, or the data set on the hub."""
    if folder is None:
        return {"hub": [path, subset, split]}
    return {"sha256": sha256_once(file_of(name, split, folder))}


def file_of(name: str, split: str, folder: Path) -> Path:
    option = "evaluation.shots_dir" if split == SHOTS else "evaluation.data_dir"
    require(folder.is_dir(), f"{option}: {folder} is no folder")
    found = [file for file in sorted(folder.glob(f"{name}.{split}*")) if reader_of(file)]
    if not found:
        hub = "" if split == SHOTS else "; without data_dir the rows come from the Hugging Face hub"
        raise DataMissing(f"{option}: {folder} has no {name}.{split}*.jsonl, .jsonl.gz or .parquet{hub}")
    require(len(found) == 1, f"{option}: {folder} has more than one {name}.{split}: {', '.join(map(str, found))}")
    return found[0]


def reader_of(file: Path) -> str:
    return next((suffix for suffix in READERS if file.name.endswith(suffix)), "")


def json_lines(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        for line in lines:
            yield json.loads(line)


def parquet(file: Path) -> Iterator[dict[str, Any]]:
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
