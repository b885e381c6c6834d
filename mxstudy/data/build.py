"""From a corpus to shard files: train or load the tokenizer, drop duplicates, split, tokenise, write, count."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mxstudy import config
from mxstudy.data import corpus
from mxstudy.data.corpus import SPLITS, Split
from mxstudy.data.tokenizer import Tokenizer, load_tokenizer
from mxstudy.reader import require

MAX_FILE_TOKENS = 2**27
BATCH_CHARACTERS = 2**21  # of documents that are tokenised together
REPORT_EVERY_S = 10.0
NO_TOKENS = np.empty(0, np.int64)

Report = Callable[[str], None]
Counts = dict[Split, dict[str, int]]  # split -> tokens, documents, duplicates, bytes


def build(data: config.Data, tokenizer: config.Tokenizer, origin: dict[str, Any], folder: Path, report: Report) -> None:
    """Fill `folder` with shards; of what a killed process left there only a trained tokenizer is used again."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # else a fork, by whomever, switches it off
    folder.mkdir(exist_ok=True)
    for leftover in set(folder.iterdir()) - {folder / "tokenizer.json"}:
        leftover.unlink()
    started_s = time.monotonic()
    loaded = load_tokenizer(tokenizer, lambda: train_texts(data), folder / "tokenizer.json")
    loaded.save(folder / "tokenizer.json")
    report(f"tokenizer: {loaded.vocab_size} ids, ready after {time.monotonic() - started_s:.1f} s")
    contents = tokenize(data, loaded, folder, report)
    files = [*sorted(folder.glob("*.bin")), folder / "tokenizer.json"]
    known = {key: getattr(loaded, key) for key in ("vocab_size", "eos_id", "eos_token")}
    manifest = {
        **origin,
        "tokenizer": origin["tokenizer"] | known | {"sha256": loaded.identity},
        **contents,
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": corpus.sha256_of(file)} for file in files},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def tokenize(data: config.Data, tokenizer: Tokenizer, folder: Path, report: Report) -> dict[str, Any]:
    """Write the token files; returns the manifest's dtype, counts by split, and number of files skipped."""
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    counts = no_counts()
    skipped: list[Path] = []
    reported_s = started_s = time.monotonic()
    for batch in batched(unique_documents(data, counts, skipped.append)):
        ids = tokenizer.encode_batch([text for _, text in batch])
        for split in SPLITS:
            ended = [np.append(i, tokenizer.eos_id) for (side, _), i in zip(batch, ids, strict=True) if side == split]
            append(np.concatenate([*ended, NO_TOKENS]).astype(dtype), folder, split, counts[split])
        if time.monotonic() - reported_s > REPORT_EVERY_S:
            reported_s = time.monotonic()
            report(f"tokenising: {summary(counts)}")
    report(f"tokenised in {time.monotonic() - started_s:.1f} s: {summary(counts)}")
    require(any(split["documents"] for split in counts.values()), "data: the corpus is empty: it has no text")
    require(counts["train"]["documents"] > 0, "data.validation_fraction: it leaves no document to train on")
    return {"dtype": dtype.str, "splits": counts, "skipped_files": len(skipped)}


def append(ids: np.ndarray, folder: Path, split: Split, count: dict[str, int]) -> None:
    """To the split's last file, and on to the next when it is full."""
    while len(ids):
        index, used = divmod(count["tokens"], MAX_FILE_TOKENS)
        part, ids = np.split(ids, [MAX_FILE_TOKENS - used])
        with (folder / f"{split}-{index:05d}.bin").open("ab") as file:
            file.write(part.tobytes())
        count["tokens"] += len(part)


def train_texts(data: config.Data) -> Iterator[str]:
    """The training split, each text once: what a tokenizer may learn from."""
    documents = unique_documents(data, no_counts(), lambda path: None)
    return (text for split, text in documents if split == "train")


def unique_documents(data: config.Data, counts: Counts, on_skip: Callable[[Path], None]) -> Iterator[tuple[Split, str]]:
    """Each text once, in corpus order, with its split; keeps 32 bytes for each, and the counts."""
    seen: set[bytes] = set()
    for text in corpus.documents(data, on_skip):
        digest = corpus.digest_of(text)
        split = corpus.split_of_digest(digest, data.validation_fraction)
        if digest in seen:
            counts[split]["duplicates"] += 1
            continue
        seen.add(digest)
        counts[split]["documents"] += 1
        counts[split]["bytes"] += len(text.encode())
        yield split, text


def batched(documents: Iterable[tuple[Split, str]]) -> Iterator[list[tuple[Split, str]]]:
    batch: list[tuple[Split, str]] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document[1])
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def no_counts() -> Counts:
    return {split: dict.fromkeys(("tokens", "documents", "duplicates", "bytes"), 0) for split in SPLITS}


def summary(counts: Counts) -> str:
    total = {key: sum(count[key] for count in counts.values()) for key in counts["train"]}
    return (
        f"{total['documents']:,} documents ({total['duplicates']:,} duplicates dropped), "
        f"{total['bytes'] / 1e6:,.1f} MB, {total['tokens']:,} tokens"
    )
