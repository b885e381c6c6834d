"""Data sets of the Hugging Face hub, streamed from the hub, from a mirror, or from any local folder of data files.

`datasets` finds the files of a subset and split by the hub's rules. Parquet and JSON lines are then read by
mxstudy.data.files, file by file and from any row on, so that a killed preparation can continue. Other kinds of files
are read by `datasets` itself, as one sequence of rows.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from mxstudy import config
from mxstudy.data.content_hash import sha256_of, sha256_once
from mxstudy.data.files import documents_of, kind_of, text_in
from mxstudy.reader import ConfigError, require, suggest

SAVED = ("state.json", "dataset_dict.json")  # files that Dataset.save_to_disk writes
COMMIT, SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")


class HuggingFaceDataset:
    """A data set named on the hub, or a local folder of data files or of what Dataset.save_to_disk wrote."""

    held_out = None  # the hash of a text decides on its split

    def __init__(self, data: config.HuggingFace) -> None:
        self.data, self.limit = data, data.max_documents
        require(
            data.mirror is None or os.path.isdir(data.mirror),
            f"data.mirror: {data.mirror!r} is not a folder; {download(data, 'FOLDER')} fills one",
        )
        self.is_local = data.mirror is None and os.path.isdir(data.name)
        require(
            not self.is_local or data.revision == "main",
            f"data.revision: the local folder {data.name!r} has no revisions; leave it at 'main'",
        )
        self.root = data.name if self.is_local else data.mirror  # None: the hub

    def identity(self) -> dict[str, Any]:
        """Return name and revision, or content hashes for a local data set; a mirror has the identity of the hub's."""
        if not self.is_local:
            return {"name": self.data.name, "revision": self.data.revision}
        folder = Path(self.data.name)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {"sha256": {path.relative_to(folder).as_posix(): sha256_once(path) for path in files}}

    @cached_property
    def parts(self) -> Sequence[str]:
        """Return the files, relative to the root (on the hub, with the commit), or the name of the whole data set."""
        root = f"{os.path.abspath(self.root)}/" if self.root else "hf://datasets/"
        return [path.removeprefix(root) for path in self.files] if self.by_file else [self.data.name]

    def read(self, part: int, skip: int, on_skip: Callable[[], None]) -> Iterator[str]:
        if not self.by_file:
            rows = enumerate(itertools.islice(self.rows(), skip, None), start=skip + 1)
            return (text_in(row, self.data.text_field, f"{self.data.name}, row {number}") for number, row in rows)
        path = self.files[part]
        if self.data.mirror and not skip:
            check_download(Path(self.data.mirror), self.parts[part], self.data.revision)
        return documents_of(path, str(kind_of(path)), self.data.text_field, skip)

    @property
    def by_file(self) -> bool:
        return not self.is_saved and all(map(kind_of, self.files))

    @property
    def is_saved(self) -> bool:
        return self.root is not None and any(Path(self.root, name).exists() for name in SAVED)

    @cached_property
    def files(self) -> list[str]:
        import datasets

        with self.explained():
            found = datasets.load_dataset_builder(**self.asked()).config.data_files or {}
        split = self.data.split
        require(split in found, f"data.split: {self.data.name!r} has no {split!r}; {suggest(split, found)}")
        return list(map(str, found[split]))

    def asked(self) -> dict[str, Any]:
        data = self.data
        place = {"path": self.root} if self.root else {"path": data.name, "revision": data.revision}
        return place | {"name": data.subset, "data_dir": data.folder}

    def rows(self) -> Iterator[Mapping[str, Any]]:
        import datasets

        with self.explained():
            if self.is_saved:
                yield from self.saved(datasets)
            else:
                yield from datasets.load_dataset(**self.asked(), split=self.data.split, streaming=True)

    def saved(self, datasets: Any) -> Iterator[Mapping[str, Any]]:
        for name in ("subset", "folder"):
            found = getattr(self.data, name)
            require(found is None, f"data.{name}: {self.root!r} was written by save_to_disk and has none")
        saved, split = datasets.load_from_disk(self.root), self.data.split
        splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
        require(split in splits, f"data.split: {self.root!r} has no {split!r}; {suggest(split, splits)}")
        return iter(splits[split])

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the errors of the libraries into a ConfigError that names the config key; pass on our own."""
        try:
            yield
        except ConfigError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            if self.root:
                key = "name" if self.is_local else "mirror"
                raise ConfigError(f"data.{key}: cannot load {self.root!r} in that folder: {error}") from error
            raise ConfigError(
                f"data.name: cannot load {self.data.name!r} on the Hugging Face hub (not a local folder), revision "
                f"{self.data.revision!r}: {error}\n  without a network, set data.mirror=FOLDER to a local copy: "
                f"{download(self.data, 'FOLDER')}"
            ) from error


def download(data: config.HuggingFace, folder: str) -> str:
    return f"`hf download --repo-type dataset {data.name} --revision {data.revision} --local-dir {folder}`"


def check_download(mirror: Path, name: str, revision: str) -> None:
    """Raise ConfigError if a mirrored file does not match the commit and sha256 that `hf download --local-dir` noted.

    The hub has a sha256 for some files only. A mirror that was made in another way has no notes and is not checked.
    """
    notes = mirror / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    if not notes.is_file():
        return
    commit, etag = notes.read_text().split()[:2]
    require(
        commit == revision or not COMMIT.fullmatch(revision),
        f"data.revision: {mirror / name} was downloaded at {commit}, not at {revision}",
    )
    require(
        not SHA256.fullmatch(etag) or sha256_of(mirror / name) == etag,
        f"data.mirror: {mirror / name}: its sha256 is not that of the hub's file, {etag}; download it again",
    )
