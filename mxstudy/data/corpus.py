"""A corpus: documents of text in a fixed order, and the identity that names it in a run's fingerprint.

It comes in parts, which are files, and each part has rows, which are documents. Each kind of data config has a source,
a row of SOURCES; adding a kind is adding a row.
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
OPENED_AT_ONCE = 16  # files, on the hub perhaps

OnSkip = Callable[[], None]


class Source(Protocol):
    """Where the documents of one kind of data config come from. `parts`: names. `limit`: rows that are taken."""

    limit: int | None

    @property
    def parts(self) -> Sequence[str]: ...

    def read(self, part: int, skip: int, on_skip: OnSkip) -> Iterator[str]:
        """The part's documents from row `skip` on, empty ones too; `on_skip` is told of a part that is no text."""

    def identity(self) -> dict[str, Any]: ...


class SourceLocation(NamedTuple):
    """How far a corpus has been read: part, rows of it, rows in all, files passed over as no text."""

    part: int = 0
    row: int = 0
    rows: int = 0
    skipped: int = 0


def source_of(data: config.Data) -> Source:
    return SOURCES[type(data)](data)


def identity(data: config.Data) -> dict[str, Any]:
    """What decides the text, as plain data: versions and contents, not the paths at which they lie."""
    return {"kind": data.kind, **source_of(data).identity()}


def check(data: config.Data) -> None:
    """That the corpus can be had, and has text where it is said to be: in the first row of a file of every folder.

    Raises ConfigError.
    """
    source = source_of(data)
    first = {name.rpartition("/")[0]: part for part, name in reversed(list(enumerate(source.parts)))}
    with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
        list(pool.map(lambda part: next(source.read(part, 0, lambda: None), None), first.values()))


def documents(data: config.Data) -> Iterator[str]:
    """Every document that is not empty, in the same order each time.

    Raises ConfigError, with the place, for what cannot be read.
    """
    return (text for _, text in read_from(source_of(data), SourceLocation()) if text)


def unique_documents(data: config.Data) -> Iterator[tuple[Split, str]]:
    """Each text once, in corpus order, with its split; keeps a digest of each, about 130 bytes."""
    seen: set[bytes] = set()
    for text in documents(data):
        digest = digest_of(text)
        if digest not in seen:
            seen.add(digest)
            yield split_of(text, data.validation_fraction), text


def read_from(source: Source, place: SourceLocation) -> Iterator[tuple[SourceLocation, str]]:
    """Every row from `place` on, with the place behind it.

    After the last part, unless the limit came before it, once more the place, with an empty text.
    """
    skipped, rows = place.skipped, place.rows

    def skip() -> None:
        nonlocal skipped
        skipped += 1

    for part in range(place.part, len(source.parts)):
        if rows == source.limit:
            return
        before = place.row if part == place.part else 0
        left = None if source.limit is None else source.limit - rows
        for row, text in enumerate(itertools.islice(source.read(part, before, skip), left), start=before + 1):
            rows += 1
            yield SourceLocation(part, row, rows, skipped), text
    yield SourceLocation(len(source.parts), 0, rows, skipped), ""


# ------------------------------------------------------------------------------------------- Python source text


class PythonSource:
    """Every .py file of the standard library, then of the installed packages, each by its path below its root."""

    limit: int | None = None

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
    """Files named by paths or glob patterns, in the order of the config, each pattern's matches sorted."""

    limit: int | None = None

    def __init__(self, data: config.Files) -> None:
        matches = [path for pattern in data.paths for path in expand(pattern)]
        self.paths = list(dict.fromkeys(matches))
        self.data = data

    @property
    def parts(self) -> list[str]:
        return list(map(str, self.paths))

    def read(self, part: int, skip: int, on_skip: OnSkip) -> Iterator[str]:
        return documents_of(str(self.paths[part]), self.data.format, self.data.text_field, skip)

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


SOURCES: dict[type, Callable[[Any], Source]] = {
    config.PySource: PythonSource,
    config.Files: LocalFiles,
    config.HuggingFace: HuggingFaceDataset,
}
