"""Build shard files from a corpus: train or load the tokenizer, drop duplicates, split, tokenise, write, count."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxstudy import config
from mxstudy.data.content_hash import sha256_of
from mxstudy.data.corpus import HeldOut, SourceLocation, read_from, source_of, unique_documents
from mxstudy.data.encode import Batch, encode_all
from mxstudy.data.growing_shards import SEEN, Counts, Partial, clear
from mxstudy.data.tokenizer import Tokenizer, load_tokenizer
from mxstudy.reader import ConfigError, require

MAX_FILE_TOKENS = 2**27
BATCH_CHARACTERS = 2**20  # characters of the documents that are tokenised together, at least
REPORT_EVERY_S = 10.0
NOTE_EVERY_S = 10.0  # a kill loses at most this much work

Report = Callable[[str], None]
OnCounts = Callable[[Counts, float], None]


def ignore_counts(counts: Counts, tokens_per_s: float) -> None:
    """Do nothing: the default `on_counts`."""


@dataclass(frozen=True)
class How:
    """How to build: `report` receives lines of progress.

    `workers`: number of processes that tokenise; 0 means this process, on all cores. `on_counts` is called after every
    batch with the counts and this process's tokens/s.
    """

    report: Report
    workers: int = 0
    on_counts: OnCounts = ignore_counts


def build(data: config.Data, tokenizer: config.Tokenizer, origin: dict[str, Any], folder: Path, how: How) -> None:
    """Fill `folder` with shards, or continue where a killed process stopped; either way the files are bit-identical."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise any fork in this process switches it off
    folder.mkdir(exist_ok=True)
    if clear(folder):
        return
    started_s = time.monotonic()
    loaded = load_tokenizer(tokenizer, lambda: train_texts(data), folder / "tokenizer.json")
    loaded.save(folder / "tokenizer.json")
    how.report(f"tokenizer: {loaded.vocab_size} ids, ready after {time.monotonic() - started_s:.1f} s")
    partial = tokenize(data, loaded, folder, how)
    vocabulary = {key: getattr(loaded, key) for key in ("vocab_size", "eos_id", "eos_token")}
    entry = {"bytes": (folder / "tokenizer.json").stat().st_size, "sha256": sha256_of(folder / "tokenizer.json")}
    files = {name: file for name, file in partial.entries().items() if name != SEEN}
    manifest = {
        **origin,
        "tokenizer": origin["tokenizer"] | vocabulary | {"sha256": loaded.identity},
        "dtype": dtype_of(loaded).str,
        "splits": partial.counts,
        "skipped_files": partial.location.skipped,
        "files": files | {"tokenizer.json": entry},
    }
    partial.finish(manifest)


def tokenize(data: config.Data, tokenizer: Tokenizer, folder: Path, how: How) -> Partial:
    """Tokenise the corpus into token files in `folder`. Return the growing shards, complete but not yet finished."""
    dtype, source = dtype_of(tokenizer), source_of(data)
    partial = Partial(folder, source.parts, MAX_FILE_TOKENS * dtype.itemsize)
    if partial.location.rows:
        how.report(f"continuing after {summary(partial.counts)}")
    noted_s = reported_s = started_s = time.monotonic()
    tokens_before = tokens(partial.counts)
    batches = batched(read_from(source, partial.location), source.held_out)
    try:
        for encoded in encode_all(batches, tokenizer, dtype, how.workers):
            partial.add(encoded, data.validation_fraction)
            now_s = time.monotonic()
            rate = (tokens(partial.counts) - tokens_before) / (now_s - started_s)
            if now_s - reported_s > REPORT_EVERY_S:
                how.report(f"tokenising: {summary(partial.counts)}; {rate:,.0f} tokens/s")
                reported_s = now_s
            if now_s - noted_s > NOTE_EVERY_S:
                partial.note(now_s - noted_s)
                noted_s = now_s
            how.on_counts(partial.counts, rate)
    except ConfigError:  # it was raised between two batches, so the files are consistent
        partial.note(time.monotonic() - noted_s)
        raise
    how.report(f"tokenised in {time.monotonic() - started_s:.1f} s: {summary(partial.counts)}; {rate:,.0f} tokens/s")
    documents = {split: count["documents"] for split, count in partial.counts.items()}
    require(any(documents.values()), "data: the corpus is empty: no document has text")
    require(documents["train"] > 0, "data.validation_fraction: it leaves no document to train on")
    require(
        documents["validation"] > 0 or source.held_out is None,
        "data: no validation text is left, because empty texts and texts that are also trained on are dropped; name "
        "other files in data.validation_paths",
    )
    return partial


def dtype_of(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def train_texts(data: config.Data) -> Iterator[str]:
    """Return the texts of the training split, each once: what a tokenizer may be trained on."""
    return (text for split, text in unique_documents(data) if split == "train")


def batched(rows: Iterable[tuple[SourceLocation, str]], held_out: HeldOut | None) -> Iterator[Batch]:
    """Yield documents in batches; the last batch may be empty, and carries the location of the corpus's end."""
    location, texts, places = SourceLocation(), list[str](), list[SourceLocation]()

    def batch() -> Batch:
        return Batch(location, texts, held_out and list(map(held_out, places)))

    characters = 0
    for location, text in rows:
        if text:
            texts.append(text)
            places.append(location)
            characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch()
            texts, places, characters = [], [], 0
    yield batch()


def tokens(counts: Counts) -> int:
    return sum(count["tokens"] for count in counts.values())


def summary(counts: Counts) -> str:
    """Return text about the size of the corpus: documents, duplicates, megabytes, tokens, and those for validation."""
    total = {key: sum(count[key] for count in counts.values()) for key in counts["train"]}
    return (
        f"{total['documents']:,} documents ({total['duplicates']:,} duplicates dropped), "
        f"{total['bytes'] / 1e6:,.1f} MB, {total['tokens']:,} tokens, {counts['validation']['tokens']:,} for validation"
    )
