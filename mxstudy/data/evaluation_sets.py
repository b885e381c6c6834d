"""Load rows of evaluation sets from a local folder or from the Hugging Face hub."""

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

DataSetRows = list[dict[str, Any]]
SHOTS = "shots"  # the split of a user's own solved examples; it is never on the hub


class DataMissing(ConfigError):
    """The rows are not in the folder, or cannot be loaded from the hub."""


def load_rows(
    name: str, path: str, subset: str | None, split: str, folder: Path | None, revision: str | None = None
) -> DataSetRows:
    """Return the rows of one split, in order.

    `folder` holds NAME.SPLIT*.jsonl, .jsonl.gz or .parquet with the columns of the hub's data set; if None, load the
    data set `path`, `subset` from that revision on the hub. Raises DataMissing if the rows are not there, with the
    command that fetches them, and ConfigError, naming the file, if a file cannot be read or has no rows.
    """
    if folder is None:
        return from_hub(name, path, subset, split, revision)
    file, option = file_of(name, split, folder), option_of(split)
    try:
        rows = list(READERS[reader_of(file)](file, option))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, pyarrow.ArrowException) as error:
        raise ConfigError(f"{option}: {file} cannot be read: {error}") from error
    require(bool(rows), f"{option}: {file} has no rows")
    return rows


def identity(name: str, path: str, subset: str | None, split: str, folder: Path | None) -> dict[str, Any]:
    """Return what identifies these rows in a fingerprint: the file's sha256, or the data set on the hub."""
    if folder is None:
        return {"hub": [path, subset, split]}
    return {"sha256": sha256_once(file_of(name, split, folder))}


def option_of(split: str) -> str:
    """Return the config key that names the folder of a split's rows."""
    return "evaluation.shots_dir" if split == SHOTS else "evaluation.data_dir"


def place_of(name: str, path: str, split: str, folder: Path | None) -> str:
    """Return where these rows are, for an error message: the config key and the data set or file."""
    return f"{option_of(split)}: {path if folder is None else file_of(name, split, folder)}"


def file_of(name: str, split: str, folder: Path) -> Path:
    option = option_of(split)
    require(folder.is_dir(), f"{option}: {folder} is not a folder")
    found = [file for file in sorted(folder.glob(f"{name}.{split}*")) if reader_of(file)]
    if not found:
        hub = "" if split == SHOTS else "; without data_dir the rows come from the Hugging Face hub"
        raise DataMissing(f"{option}: {folder} has no {name}.{split}*.jsonl, .jsonl.gz or .parquet{hub}")
    require(len(found) == 1, f"{option}: {folder} has more than one {name}.{split}: {', '.join(map(str, found))}")
    return found[0]


def reader_of(file: Path) -> str:
    return next((suffix for suffix in READERS if file.name.endswith(suffix)), "")


def json_lines(file: Path, option: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each line that is not blank."""
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                yield parse(line, f"{file}, line {number}", option)


def parquet(file: Path, option: str) -> Iterator[dict[str, Any]]:
    yield from pq.read_table(file).to_pylist()


READERS = {".jsonl": json_lines, ".jsonl.gz": json_lines, ".parquet": parquet}


@functools.cache  # an evaluation needs the rows three times: to check, to fingerprint and to run
def from_hub(name: str, path: str, subset: str | None, split: str, revision: str | None) -> DataSetRows:
    import datasets

    datasets.disable_progress_bars()
    try:
        return list(datasets.load_dataset(path, subset, split=split, revision=revision))
    except Exception as error:  # the network, the hub and the library raise many types
        fetch = f"hf download --repo-type dataset {path}" + (f" --revision {revision}" if revision else "")
        raise DataMissing(
            f"{name}: the split {split} of the data set {path} cannot be loaded ({type(error).__name__}); fetch it "
            f"with `{fetch}`, or set evaluation.data_dir= to a folder that has it"
        ) from error
