"""A corpus: documents of text in a fixed order, and the identity that names it in a run's fingerprint.

A corpus consists of parts, which are files, and each part of rows, which are documents. Each kind of data config has a
source, one entry of SOURCES; to add a kind, add an entry.
"""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import itertools
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mxstudy import config
from mxstudy.data.content_hash import Split, digest_of, sha256_once, split_of
from mxstudy.data.files import documents_of
from mxstudy.data.hub import HuggingFaceDataset
from mxstudy.reader import require

INSTALLED = ("site-packages", "dist-packages")
OPENED_AT_ONCE = 16  # files, possibly on the hub

OnSkip = Callable[[], None]


class SourceLocation(NamedTuple):
    """How far a corpus has been read: part, rows of this part, rows in all, files skipped because they are not text."""

    part: int = 0
    row: int = 0
    rows: int = 0
    skipped: int = 0


HeldOut = Callable[[SourceLocation], bool]  # whether the document that ends there is for validation


class Source(Protocol):
    """The documents of one kind of data config. `parts`: their names. `limit`: number of rows to take, None for all."""

    limit: int | None

    @property
    def held_out(self) -> HeldOut | None:
        """Return a function that splits documents by location, or None if the hash of a text decides its split."""

    @property
    def parts(self) -> Sequence[str]: ...

    def read(self, part: int, skip: int, on_skip: OnSkip) -> Iterator[str]:
        """Yield the part's documents from row `skip` on, empty ones too; call `on_skip` for a part that is not text."""

    def identity(self) -> dict[str, Any]: ...


def source_of(data: config.Data) -> Source:
    return SOURCES[type(data)](data)


def identity(data: config.Data) -> dict[str, Any]:
    """Return what determines the text, as plain data: versions and content hashes, not the paths of the files."""
    return {"kind": data.kind, **source_of(data).identity()}


def is_local(data: config.Data) -> bool:
    """Return whether the corpus is in files that the user has on this machine."""
    if isinstance(data, config.HuggingFace):
        return data.mirror is not None or os.path.isdir(data.name)
    return isinstance(data, config.Files)


def check(data: config.Data) -> None:
    """Read the first row of one file of every folder; raise ConfigError if it cannot be read or has no text column."""
    source = source_of(data)
    first = {name.rpartition("/")[0]: part for part, name in reversed(list(enumerate(source.parts)))}
    with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
        list(pool.map(lambda part: next(source.read(part, 0, lambda: None), None), first.values()))


def documents(data: config.Data) -> Iterator[str]:
    """Return every document that is not empty, always in the same order.

    Raises ConfigError, with file and row, for a document that cannot be read.
    """
    return (text for _, text in read_from(source_of(data), SourceLocation()) if text)


def unique_documents(data: config.Data) -> Iterator[tuple[Split, str]]:
    """Yield each text once, in corpus order, with its split; keeps a digest of each text, about 130 bytes."""
    seen: set[bytes] = set()
    source = source_of(data)
    for location, text in read_from(source, SourceLocation()):
        digest = digest_of(text)
        if text and digest not in seen:
            seen.add(digest)
            if source.held_out is None:
                yield split_of(text, data.validation_fraction), text
            else:
                yield "validation" if source.held_out(location) else "train", text


def read_from(source: Source, location: SourceLocation) -> Iterator[tuple[SourceLocation, str]]:
    """Yield every row from `location` on, each with the location after it.

    After the last part, unless `limit` was reached before, yield the final location once more with an empty text.
    """
    skipped, rows = location.skipped, location.rows

    def skip() -> None:
        nonlocal skipped
        skipped += 1

    for part in range(location.part, len(source.parts)):
        if rows == source.limit:
            return
        before = location.row if part == location.part else 0
        left = None if source.limit is None else source.limit - rows
        for row, text in enumerate(itertools.islice(source.read(part, before, skip), left), start=before + 1):
            rows += 1
            yield SourceLocation(part, row, rows, skipped), text
    yield SourceLocation(len(source.parts), 0, rows, skipped), ""


# ------------------------------------------------------------------------------------------- Python source text


class PythonSource:
    """Every .py file of the standard library, then of the installed packages, each sorted by path below its root."""

    limit: int | None = None
    held_out: HeldOut | None = None

    def __init__(self, data: config.PySource) -> None:
        installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
        self.installed = list(dict.fromkeys(map(os.path.realpath, installed))) if data.include_site_packages else []

    @functools.cached_property
    def files(self) -> list[Path]:
        standard = python_files(Path(sysconfig.get_path("stdlib")), without=INSTALLED)
        return [*standard, *itertools.chain.from_iterable(python_files(Path(root)) for root in self.installed)]

    @property
    def parts(self) -> list[str]:
        return list(map(str, self.files))

    def read(self, part: int, skip: int, on_skip: OnSkip) -> Iterator[str]:
        if not skip:
            try:
                yield self.files[part].read_bytes().decode()
            except UnicodeDecodeError:
                on_skip()

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
    """Files named by paths or glob patterns, in the order of the config, each pattern's matches sorted.

    `is_cut`: there is one text, and so its last part is a document of its own, for validation.
    """

    limit: int | None = None

    def __init__(self, data: config.Files) -> None:
        self.paths = files_of("paths", data.paths)
        self.validation_paths = files_of("validation_paths", data.validation_paths)
        trained_on = set(map(os.path.realpath, self.paths))
        for path in self.validation_paths:
            require(
                os.path.realpath(path) not in trained_on,
                f"data.validation_paths: {path} is one of data.paths too; leave it out of one of them",
            )
        self.is_cut = (
            data.format == "text"
            and len(self.paths) == 1
            and not self.validation_paths
            and data.validation_fraction > 0
        )
        self.data = data

    @property
    def parts(self) -> list[str]:
        return list(map(str, self.paths + self.validation_paths))

    @property
    def held_out(self) -> HeldOut | None:
        if self.is_cut:
            return lambda location: location.row > 1
        return (lambda location: location.part >= len(self.paths)) if self.validation_paths else None

    def read(self, part: int, skip: int, on_skip: OnSkip) -> Iterator[str]:
        path = self.parts[part]
        if not self.is_cut:
            return documents_of(path, self.data.format, self.data.text_field, skip)
        (text,) = documents_of(path, self.data.format, self.data.text_field)
        return itertools.islice(cut(text, self.data.validation_fraction, path), skip, None)

    def identity(self) -> dict[str, Any]:
        found: dict[str, Any] = {"sha256": [sha256_once(path) for path in self.paths]}
        if self.validation_paths:
            found["validation_sha256"] = [sha256_once(path) for path in self.validation_paths]
        return found | ({"split": "last part"} if self.is_cut else {})


def files_of(key: str, patterns: Sequence[str]) -> list[Path]:
    """Return each file that one of the patterns of `data.KEY` names, once."""
    return list(dict.fromkeys(path for pattern in patterns for path in expand(f"data.{key}", pattern)))


def expand(key: str, pattern: str) -> list[Path]:
    """Return the file of that name, or the files that match the glob pattern, sorted; folders never match."""
    require(bool(pattern.strip()), f"{key}: {pattern!r} names no file; leave it out")
    if os.path.exists(pattern):
        require(not os.path.isdir(pattern), f"{key}: {pattern!r} is a folder; name its files: {pattern}/*")
        require(os.path.isfile(pattern), f"{key}: {pattern!r} is a pipe or a device; copy its text to a file")
        return [Path(pattern)]
    found = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
    require(bool(found), f"{key}: {pattern!r} does not exist, and matches no file as a glob pattern")
    return found


def cut(text: str, validation_fraction: float, where: str) -> Iterator[str]:
    """Yield a text's first part, and its last part with `validation_fraction` of the characters."""
    require(bool(text), f"data.paths: {where} is empty; name a file with text")
    first = int(len(text) * (1 - validation_fraction))
    parts = {"train": text[:first], "validate": text[first:]}
    for purpose, part in parts.items():
        share = f"{validation_fraction} of the {len(text):,} characters of {where}"
        require(bool(part), f"data.validation_fraction: {share} leaves none to {purpose} on")
    yield from parts.values()


SOURCES: dict[type, Callable[[Any], Source]] = {
    config.PySource: PythonSource,
    config.Files: LocalFiles,
    config.HuggingFace: HuggingFaceDataset,
}
