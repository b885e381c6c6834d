"""Prepare a corpus, or those of a blend: stream, tokenise on all cores, write the shards that a training will find.

If killed at any moment, it resumes where it stopped, and the shards have the same bytes. At the end every file is read
back and its sha256 compared with the manifest's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path

from mxstudy.config import PrepareData, blend_of
from mxstudy.data import blends
from mxstudy.data.growing_shards import Counts
from mxstudy.data.shards import Shards, verify
from mxstudy.results.terminal import markdown, show
from mxstudy.small_files import read_json
from mxstudy.studies.folders import check_folder
from mxstudy.studies.protocol import Identity, Study
from mxstudy.tracking.folder import MOVE_AWAY, RunFolder
from mxstudy.tracking.journal import Journal
from mxstudy.tracking.mlflow_parent import Summary
from mxstudy.train.recorder import finish_and_mirror
from mxstudy.whole_files import replace_file

PROBE = "prepare_data"  # the name of its rows in a journal
RECORD_EVERY_S = 10.0
COUNTED = ("documents", "duplicates", "bytes", "tokens")


class PrepareDataStudy(Study[PrepareData]):
    def check(self, config: PrepareData, ranks: int = 1) -> None:
        """Raise ConfigError unless the corpus is prepared, or its text and a folder for the shards are available."""
        cache_dir = Path(config.cache_dir)
        blends.check(config.data, config.tokenizer, cache_dir)
        folders = blends.locate(config.data, config.tokenizer, cache_dir)
        if not all(name in folders and os.path.exists(folders[name]) for name in blend_of(config.data).corpora):
            check_folder("cache_dir", cache_dir)

    def identity_key(self, config: PrepareData) -> Hashable:
        return repr(config.data), config.tokenizer

    def identity(self, config: PrepareData) -> Identity:
        return "cpu", blends.identity(config.data, config.tokenizer)

    def run(self, config: PrepareData, folder: RunFolder, label: str) -> str:
        return run(config, folder, label)

    def summarise(self, runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        """Print and return a line for every corpus: its totals, and its shards' folder unless they were deleted."""
        columns = ("arm", *COUNTED, "shards")
        cells = [(name, *summary_of(folder)) for name, folder in runs.items()]
        show("prepared", columns, cells, [])
        return Summary(markdown("prepared", columns, cells))


STUDY = PrepareDataStudy()


def run(config: PrepareData, folder: RunFolder, label: str) -> str:
    """Prepare and verify the shards, and return the run's state."""
    with folder.lock(), folder.heartbeat():
        folder.update(state="running", reason=None)
        with Record(folder) as record:
            workers = config.workers or len(os.sched_getaffinity(0))
            report = partial(print, flush=True)
            cache_dir, shards, verified_s = Path(config.cache_dir), dict[str, Shards](), 0.0
            for name, one in blends.prepare(config.data, config.tokenizer, cache_dir, report, workers, record.watch):
                began_s = time.monotonic()
                verify(one)
                verified_s += time.monotonic() - began_s
                record.end(one)
                shards[name] = one
        replace_file(folder.path / "shards.json", json.dumps(blends.manifest_of(shards), indent=2))
        show(label, COLUMNS, rows_of(shards), [f"shards: {one.folder}" for one in shards.values()])
        files = sum(len(one.manifest["files"]) for one in shards.values())
        print(f"sha256 of {files} files verified in {verified_s:.1f} s", flush=True)
        folder.update(steps=folder.status().step)  # the number of documents is known only now
        finish_and_mirror(config, folder, label)
    return "finished"


class Record:
    """Records counts and tokens/s in the journal every few seconds; a row's step is the number of documents so far."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.journal, self.recorded_s = folder, Journal(folder.journal_path), 0.0
        self.tokens_per_s: float | None = None  # of this process; None if the shards existed already
        self.done = dict.fromkeys(COUNTED, 0)  # of the corpora before this one

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def watch(self, counts: Counts, tokens_per_s: float) -> None:
        """Take the counts so far and this process's rate, and record them if the last row is old enough."""
        total = totals([self.done, *counts.values()])
        if self.tokens_per_s is None:  # documents after a killed process's last saved state are prepared again
            self.journal.resumed_from(total["documents"])
        self.tokens_per_s = tokens_per_s
        if time.monotonic() - self.recorded_s > RECORD_EVERY_S:
            self.write(total)
            self.recorded_s = time.monotonic()

    def end(self, shards: Shards) -> None:
        """Record the totals up to these finished shards."""
        self.done = totals([self.done, *shards.manifest["splits"].values()])
        self.journal.resumed_from(self.done["documents"])
        self.write(self.done)

    def write(self, counts: dict[str, int]) -> None:
        rate = {} if self.tokens_per_s is None else {"tokens_per_s": self.tokens_per_s}
        self.journal.write({"step": counts["documents"], "probe": PROBE, "values": counts | rate})
        self.folder.update(step=counts["documents"])


def totals(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of the counts, of both splits and of all corpora."""
    each = list(counts)
    return {name: sum(count[name] for count in each) for name in COUNTED}


# ------------------------------------------------------------------------------------------------- on the terminal

COLUMNS = ("split", *COUNTED, "bytes/token")


def rows_of(shards: Mapping[str, Shards]) -> list[tuple[str, ...]]:
    rows = []
    for corpus, one in shards.items():
        for split, count in one.manifest["splits"].items():
            where = f"{corpus} {split}" if len(shards) > 1 else split
            ratio = f"{count['bytes'] / max(count['tokens'], 1):.3f}"
            rows.append((where, *(f"{count[name]:,}" for name in COUNTED), ratio))
    return rows


def summary_of(folder: RunFolder) -> tuple[str, ...]:
    manifests = blends.manifests_in(read_json(folder.path / "shards.json", MOVE_AWAY))
    config = folder.config_of(PrepareData)
    places = blends.locate(config.data, config.tokenizer, Path(config.cache_dir)).values()
    is_there = len(places) == len(manifests) and all(place.exists() for place in places)
    shards = ", ".join(map(str, places)) if is_there else "deleted; rerun=true makes them again"
    counts = totals(count for manifest in manifests for count in manifest["splits"].values())
    return *(f"{value:,}" for value in counts.values()), shards
