"""Measure tokens per second of batches from shards, and of tokenising a corpus against plain `datasets.map`.

batches: one thread reads shuffled rows of the global batch, as int64 on the CPU, once from files in memory and once
from files dropped from the page cache. `times_gpu` is the rate divided by what one GPU consumes in training.

tokenising: `prepare` runs as +experiment=prepare_data calls it, from Parquet files to verified shards, with everything:
starting processes, reading, sha256, duplicates, the split, writing. The peer is `datasets.map` with the same batch
encoder, tokenizer and number of processes, on a data set that is already loaded in Arrow, at the better of two batch
sizes. Both run in turns, the best round counts, and both must produce the same number of tokens. On a machine that is
busy with other work, compare tokens per second of CPU time.

python -m benchmarks.data [--tokens 268435456] [--megabytes 100] [--texts FILE.parquet ...] [--json PATH]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from benchmarks.page_cache import forget
from mxstudy import config
from mxstudy.data import corpus
from mxstudy.data.build_shards import MAX_FILE_TOKENS
from mxstudy.data.shards import Shards, prepare, verify
from mxstudy.data.tokenizer import Tokenizer, load_pretrained, train_bpe

# Tokens per second of llama_125m's fastest arm on one H200, median over the steps: results/mxnorm_pretrain.md.
GPU_TOKENS_PER_S = 395_923
BATCH_SIZE, SEQUENCE_LENGTH = 32, 4096  # sizes of the same run
MAP_BATCHES = (100, 1000)  # documents
FILES = 4
VOCAB_SIZE = 32_000


# ------------------------------------------------------------------------------------------------------- batches


def random_shards(folder: Path, tokens: int) -> Shards:
    """Write and return random shards with a vocabulary of 32,000, in files as large as those of `prepare`.

    The manifest has only what Batches reads.
    """
    rng, names = np.random.default_rng(0), []
    for number, start in enumerate(range(0, tokens, MAX_FILE_TOKENS)):
        names.append(f"train-{number:05d}.bin")
        rng.integers(VOCAB_SIZE, size=min(MAX_FILE_TOKENS, tokens - start), dtype=np.uint16).tofile(folder / names[-1])
    return Shards(folder, {"dtype": "<u2", "files": dict.fromkeys(names)})


def measure_batches(folder: Path, tokens: int, steps: int, batch_size: int, sequence_length: int) -> list[dict]:
    from mxstudy.data.batches import Batches  # loads torch, which processes that tokenise must not import
    from mxstudy.data.sampling import Sampling

    shards = random_shards(folder, tokens)
    rows = []
    for where in ("memory", "disk"):
        if where == "disk":
            forget(folder)
        once = tokens // sequence_length // batch_size  # so many steps read every page
        sampling = Sampling(config.blend_of(config.PySource()), max(steps, once), batch_size, data_seed=0)
        batches = Batches({"pysource": shards}, sampling, sequence_length)
        for step in range(once if where == "memory" else 0):
            batches.train(step)
        began_s = time.perf_counter()
        for step in range(steps):
            batches.train(step)
        seconds = time.perf_counter() - began_s
        rate = steps * batch_size * sequence_length / seconds
        rows.append({"batches_from": where, "tokens_per_s": rate, "times_gpu": rate / GPU_TOKENS_PER_S})
    return rows


# ---------------------------------------------------------------------------------------------------- tokenising


def texts_of(megabytes: float, paths: Sequence[str]) -> list[str]:
    """Return distinct texts of at least `megabytes` in UTF-8, from the Parquet files or the installed Python source."""
    data = config.Files(format="parquet", paths=tuple(paths)) if paths else config.PySource(include_site_packages=True)
    texts, size = [], 0
    for _, text in corpus.unique_documents(data):
        if size >= megabytes * 1e6:
            break
        texts.append(text)
        size += len(text.encode())
    return texts


def write_corpus(folder: Path, texts: list[str]) -> list[str]:
    """Write Parquet files with equal numbers of documents, and return their paths."""
    paths = []
    for number in range(FILES):
        paths.append(str(folder / f"{number:05d}.parquet"))
        parquet.write_table(pa.table({"text": texts[number::FILES]}), paths[-1], row_group_size=1000)
    return paths


class Measured(NamedTuple):
    """Tokens without EOS, seconds of wall time, and CPU seconds of this process and its children."""

    tokens: int
    seconds: float
    cpu_s: float


def timed(tokenise: Callable[[], int]) -> Measured:
    began_s, began = time.perf_counter(), sum(os.times()[:4])
    tokens = tokenise()
    return Measured(tokens, time.perf_counter() - began_s, sum(os.times()[:4]) - began)


def ours(paths: list[str], tokenizer: str, folder: Path, workers: int) -> int:
    """Tokenise with `prepare`, and return the number of tokens without EOS."""
    data = config.Files(format="parquet", paths=tuple(paths))
    shards = prepare(data, config.Pretrained(name=tokenizer), folder, lambda line: None, workers)
    verify(shards)
    return sum(split["tokens"] - split["documents"] for split in shards.manifest["splits"].values())


def plain_map(dataset: Any, tokenizer: Tokenizer, folder: Path, workers: int, batch_size: int) -> int:
    """Tokenise with `datasets.map`, and return the number of tokens without EOS."""

    def ids_of(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        backend = tokenizer.backend  # when pickled itself, it would parse special tokens in texts
        return {"ids": [encoding.ids for encoding in backend.encode_batch_fast(rows["text"], add_special_tokens=False)]}

    mapped = dataset.map(
        ids_of,
        batched=True,
        batch_size=batch_size,
        num_proc=workers,
        remove_columns=["text"],
        cache_file_name=str(folder / "mapped.arrow"),
        load_from_cache_file=False,
    )
    return sum(len(chunk.flatten()) for chunk in mapped.data.column("ids").chunks)


def measure_tokenising(folder: Path, texts: list[str], name: str | None, workers: int, rounds: int) -> list[dict]:
    import datasets

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no threads within a process, because there is one process per core
    datasets.disable_progress_bars()
    tokenizer = load_pretrained(config.Pretrained(name=name)) if name else None
    tokenizer = tokenizer or train_bpe(config.TrainedBPE(vocab_size=VOCAB_SIZE, train_bytes=20_000_000), iter(texts))
    tokenizer.save(folder / "tokenizer.json")
    paths = write_corpus(folder, texts)
    dataset = datasets.load_dataset("parquet", data_files=paths, split="train", cache_dir=str(folder / "cache"))
    results: dict[str, list[Measured]] = defaultdict(list)
    for number in range(rounds):
        here = folder / f"round-{number}"
        here.mkdir()
        results["prepare"].append(timed(partial(ours, paths, str(folder / "tokenizer.json"), here, workers)))
        for size in MAP_BATCHES:
            call = partial(plain_map, dataset, tokenizer, here, workers, size)
            results[f"datasets.map, batches of {size}"].append(timed(call))
    assert len({each.tokens for runs in results.values() for each in runs}) == 1, results
    rows: list[dict[str, Any]] = [rates(who, runs) for who, runs in results.items()]
    for name, over in (("tokens_per_s", "over_map"), ("tokens_per_cpu_s", "cpu_over_map")):
        best = max(row[name] for row in rows if row["tokenising"] != "prepare")
        rows = [row | {over: row[name] / best} for row in rows]
    return rows


def rates(who: str, runs: list[Measured]) -> dict[str, Any]:
    by_clock, by_cpu = (max(each.tokens / each[number] for each in runs) for number in (1, 2))
    return {"tokenising": who, "tokens_per_s": by_clock, "tokens_per_cpu_s": by_cpu}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**28, help="in the shards that batches are read from")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--sequence-length", type=int, default=SEQUENCE_LENGTH)
    parser.add_argument("--megabytes", type=float, default=100.0, help="of text to tokenise")
    what = "Parquet files with a column text; default: Python source"
    parser.add_argument("--texts", nargs="*", default=[], help=what)
    parser.add_argument("--tokenizer", help="a tokenizer.json; default: a BPE of 32,000, trained here")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("figures/data.json"))
    asked = parser.parse_args(words)
    from benchmarks.report import measured, show  # loads torch too

    with tempfile.TemporaryDirectory() as folder:
        batches = measure_batches(Path(folder), asked.tokens, asked.steps, asked.batch_size, asked.sequence_length)
    show(batches)
    with tempfile.TemporaryDirectory() as folder:
        texts = texts_of(asked.megabytes, asked.texts)
        tokenising = measure_tokenising(Path(folder), texts, asked.tokenizer, asked.workers, asked.rounds)
    show(tokenising)
    sizes = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts), "workers": asked.workers}
    measured([*batches, *tokenising], asked.json, gpu_tokens_per_s=GPU_TOKENS_PER_S, cores=os.cpu_count(), **sizes)


if __name__ == "__main__":
    main()
