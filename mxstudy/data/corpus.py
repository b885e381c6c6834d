"""A corpus: documents of text in a fixed order, and the identity that names it in a run's fingerprint.

Each kind of data config has a source, a row of SOURCES; adding a kind is adding a row. All of them stream: no more
than a document, or a row group of a Parquet file, is held in memory.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from mxstudy import config
from mxstudy.reader import ConfigError, require, suggest

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
INSTALLED = ("site-packages", "dist-packages")


def documents(data: config.Data, on_skip: Callable[[Path], None] = lambda path: None) -> Iterator[str]:
    """Every document that is not empty, in the same order each time.

    `on_skip` is told of each file of Python source that is not UTF-8. Raises ConfigError, with the place, for what
    cannot be read.
    """
    return filter(None, SOURCES[type(data)](data).documents(on_skip))


def identity(data: config.Data) -> dict[str, Any]:
    """What decides the text, as plain data: versions and contents, not the paths at which they lie."""
    return {"kind": data.kind, **SOURCES[type(data)](data).identity()}


def digest_of(text: str) -> bytes:
    """sha256 of the text as UTF-8: what tells duplicates, and on which side of the split a document is."""
    return hashlib.sha256(text.encode()).digest()


def split_of(text: str, validation_fraction: float) -> Split:
    """The side of the split: the same wherever the text turns up, whatever else the corpus holds."""
    return split_of_digest(digest_of(text), validation_fraction)


def split_of_digest(digest: bytes, validation_fraction: float) -> Split:
    """`digest_of` a text is uniform over its 256-bit values; the lowest fraction of them is for validation."""
    uniform = int.from_bytes(digest[:8], "big") / 2**64
    return "validation" if uniform < validation_fraction else "train"


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


class Source(Protocol):
    """Where the documents of one kind of data config come from."""

    def documents(self, on_skip: Callable[[Path], None]) -> Iterator[str]: ...

    def identity(self) -> dict[str, Any]: ...


# ------------------------------------------------------------------------------------------- Python source text


class PythonSource:
    """Every .py file of the standard library, then of the installed packages, each by its path below its root."""

    def __init__(self, data: config.PySource) -> None:
        installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
        self.installed = list(dict.fromkeys(map(os.path.realpath, installed))) if data.include_site_packages else []

    def documents(self, on_skip: Callable[[Path], None]) -> Iterator[str]:
        standard = python_files(Path(sysconfig.get_path("stdlib")), without=INSTALLED)
        for path in itertools.chain(standard, *(python_files(Path(root)) for root in self.installed)):
            try:
                yield path.read_bytes().decode()
            except UnicodeDecodeError:
                on_skip(path)

    def identity(self) -> dict[str, Any]:
        python = f"{platform.python_implementation()} {platform.python_version()}"
        found = importlib.metadata.distributions(path=self.installed)
        packages = {f"{package.name}=={package.version}" for package in found}
        return {"python": python, "packages": sorted(packages)}


def python_files(root: Path, without: Iterable[str] = ()) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


# -------------------------------------------------------------------------------------------------- local files


class LocalFiles:
    """Files named by paths or glob patterns, in the order of the config, each pattern's matches sorted."""

    def __init__(self, data: config.Files) -> None:
        matches = [path for pattern in data.paths for path in expand(pattern)]
        self.paths = list(dict.fromkeys(matches))
        self.data = data

    def documents(self, on_skip: Callable[[Path], None]) -> Iterator[str]:
        read = READERS[self.data.format]
        return itertools.chain.from_iterable(read(path, self.data.text_field) for path in self.paths)

    def identity(self) -> dict[str, Any]:
        return {"sha256": [sha256_once(path) for path in self.paths]}


def expand(pattern: str) -> list[Path]:
    """The file of that name, or the files that match the pattern, sorted; folders do not match `*`."""
    if os.path.exists(pattern):
        require(os.path.isfile(pattern), f"data.paths: {pattern!r} is a folder; name its files: {pattern}/*")
        return [Path(pattern)]
    found = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
    require(bool(found), f"data.paths: {pattern!r} does not exist, and as a pattern it matches no file")
    return found


def read_text(path: Path, text_field: str) -> Iterator[str]:
    yield decode(path.read_bytes(), path)


def read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                where = f"{path}, line {number}"
                yield text_in(parse(decode(line, path, offset), where), text_field, where)
            offset += len(line)


def read_parquet(path: Path, text_field: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            require_column(file.schema_arrow.names, text_field, path)
            batches = (batch.to_pylist() for batch in file.iter_batches(columns=[text_field]))
            for number, row in enumerate(itertools.chain.from_iterable(batches), start=1):
                yield text_in(row, text_field, f"{path}, row {number}")
    except pyarrow.ArrowException as error:
        raise ConfigError(f"data.paths: {path} cannot be read as Parquet: {error}") from error


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}


def decode(content: bytes, path: Path, offset: int = 0) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.paths: {path} is not UTF-8: {error.reason} at byte {offset + error.start}") from error


def parse(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"data.paths: {where}: not JSON: {error}") from error
    require(isinstance(row, dict), f"data.paths: {where}: must be a JSON object, not {type(row).__name__}")
    return row


def text_in(row: Mapping[str, Any], text_field: str, where: str) -> str:
    """The text of a row; ConfigError if it has none, or none that UTF-8 can hold."""
    require_column(row, text_field, where)
    text = row[text_field]
    require(isinstance(text, str), f"data.text_field: {where}: {text_field!r} is {text!r}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"data.text_field: {where}: not valid Unicode: {error.reason}") from error
    return text


def require_column(names: Iterable[str], text_field: str, where: object) -> None:
    require(text_field in names, f"data.text_field: {where} has no column {text_field!r}; {suggest(text_field, names)}")


# --------------------------------------------------------------------------------------- Hugging Face data sets


class HuggingFaceDataset:
    """A data set of the hub, streamed, or a local folder: of data files, or as Dataset.save_to_disk writes it."""

    def __init__(self, data: config.HuggingFace) -> None:
        self.data = data
        self.folder = Path(data.name) if os.path.isdir(data.name) else None
        require(
            self.folder is None or data.revision == "main",
            f"data.revision: the local folder {data.name!r} has no revisions; leave it at 'main'",
        )

    def documents(self, on_skip: Callable[[Path], None]) -> Iterator[str]:
        rows = itertools.islice(self.rows(), self.data.max_documents)
        for number, row in enumerate(rows, start=1):
            yield text_in(row, self.data.text_field, f"{self.data.name}, row {number}")

    def identity(self) -> dict[str, Any]:
        if self.folder is None:
            return {"name": self.data.name, "revision": self.data.revision}
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {"sha256": {path.relative_to(self.folder).as_posix(): sha256_once(path) for path in files}}

    def rows(self) -> Iterator[Mapping[str, Any]]:
        try:
            yield from self.load()
        except ConfigError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            place = "on the Hugging Face hub (it is no local folder)" if self.folder is None else "in that folder"
            raise ConfigError(f"data.name: cannot load {self.data.name!r} {place}: {error}") from error

    def load(self) -> Iterable[Mapping[str, Any]]:
        import datasets

        data, folder = self.data, self.folder
        if folder is None:
            return datasets.load_dataset(
                data.name, data.subset, split=data.split, revision=data.revision, streaming=True
            )
        if not any((folder / name).exists() for name in ("state.json", "dataset_dict.json")):
            return datasets.load_dataset(data.name, data.subset, split=data.split, streaming=True)
        require(data.subset is None, f"data.subset: {data.name!r} was written by save_to_disk and has no subsets")
        saved = datasets.load_from_disk(data.name)
        splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
        require(data.split in splits, f"data.split: {data.name!r} has no {data.split!r}; {suggest(data.split, splits)}")
        return splits[data.split]


SOURCES: dict[type, Callable[[Any], Source]] = {
    config.PySource: PythonSource,
    config.Files: LocalFiles,
    config.HuggingFace: HuggingFaceDataset,
}
