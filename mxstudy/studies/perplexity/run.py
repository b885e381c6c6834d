"""Run a perplexity study: the loss of a checkpoint on a corpus, in sliding windows, by document and in total.

Every token of a document's text is scored: its first token is predicted from EOS, and the EOS that ends it is not
scored. Documents are scored in chunks; finished chunks are saved, so a killed run continues with the next one.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from mxstudy import results
from mxstudy.config import Perplexity
from mxstudy.data.content_hash import digest_of
from mxstudy.data.tokenizer import Tokenizer
from mxstudy.evaluation import checkpoints
from mxstudy.evaluation.checkpoints import Trained
from mxstudy.evaluation.scorer import Scorer
from mxstudy.evaluation.windows import sliding_windows
from mxstudy.studies.perplexity.check import Document, Windows, documents_of, windows_of
from mxstudy.studies.perplexity.tables import show_totals
from mxstudy.studies.trained_model import described, finish, scoring, write_journal
from mxstudy.tracking.folder import RunFolder
from mxstudy.whole_files import replace_file

PROBE = "perplexity"  # the name of its row in a journal
TOKENS_AT_ONCE = 2**20  # of the windows that are scored in one call
REPORT_EVERY_S = 10.0


def run(config: Perplexity, folder: RunFolder, label: str) -> str:
    """Score the documents, continuing where an earlier process stopped, and return the run's state."""
    with folder.lock(), folder.heartbeat():
        path, trained = described(config)
        windows = windows_of(config, trained)
        folder.update(state="running", steps=config.documents, reason=None)
        table = results.table_path(folder, "documents")
        if not table.exists():
            with scoring(config, path, replace(trained, max_length=windows.length), config.tokens_per_batch) as scorer:
                score_one = functools.partial(score, scorer, trained.tokenizer, windows)
                chunks = list(score_chunks(config, folder, label, score_one))
            results.save_table(folder, table.stem, pd.concat(chunks, ignore_index=True))
        for part in table.parent.glob("documents_*.parquet"):
            part.unlink()
        record(config, folder, path, trained, windows)
        show_totals(folder)
        finish(config, folder, label)
    return "finished"


def score_chunks(
    config: Perplexity, folder: RunFolder, label: str, score_chunk: Callable[[Sequence[Document]], pd.DataFrame]
) -> Iterator[pd.DataFrame]:
    """Yield the rows of every chunk, in order; each is saved before the next begins, and a saved chunk is read back."""
    shown_s = time.monotonic()
    for chunk, group in itertools.groupby(documents_of(config), lambda document: document.chunk):
        part, documents, began_s = results.table_path(folder, f"documents_{chunk:05}"), list(group), time.monotonic()
        if part.exists():
            rows = results.read_table(part)[0]
            if rows["document"].tolist() == [document.number for document in documents]:
                yield rows
                continue
        rows = score_chunk(documents)
        results.save_table(folder, part.stem, rows)
        done, now_s = int(rows["document"].max()) + 1, time.monotonic()
        folder.update(step=done)
        if now_s - shown_s > REPORT_EVERY_S:
            shown_s = now_s
            print(f"{label}  {done:,} documents  {rows['tokens'].sum() / (now_s - began_s):,.0f} tokens/s", flush=True)
        yield rows


def score(scorer: Scorer, tokenizer: Tokenizer, windows: Windows, documents: Sequence[Document]) -> pd.DataFrame:
    """Return a row per document: document (its number), sha256 (16 digits), bytes (UTF-8), characters, tokens, nats.

    Raises ValueError, naming the document, if a loss is not finite.
    """
    ids = tokenizer.encode_batch([document.text for document in documents])
    nats = np.zeros(len(documents))
    asked = ((i, r) for i, tokens in enumerate(ids) for r in sliding_windows(tokens, tokenizer.eos_id, *windows))
    while batch := list(itertools.islice(asked, max(TOKENS_AT_ONCE // windows.length, 1))):
        indices, requests = zip(*batch, strict=True)
        np.subtract.at(nats, list(indices), [scored.nats for scored in scorer.score(list(requests))])
    for document, loss_nats in zip(documents, nats.tolist(), strict=True):
        if not math.isfinite(loss_nats):
            raise ValueError(f"document {document.number}, {document.text[:60]!r}...: its loss is {loss_nats} nats")
    return pd.DataFrame(
        {
            "document": [document.number for document in documents],
            "sha256": [digest_of(document.text).hex()[:16] for document in documents],
            "bytes": [len(document.text.encode()) for document in documents],
            "characters": [len(document.text) for document in documents],
            "tokens": [len(tokens) for tokens in ids],
            "nats": nats,
        }
    )


def totals_of(documents: pd.DataFrame) -> dict[str, float]:
    """Return totals over the table's rows, one per document, and their ratios; perplexity is per token.

    bits_per_byte is R = sum_i b_i / sum_i n_i, where document i has b_i bits (nats / ln 2) in n_i bytes. Its standard
    error s is that of a ratio estimator over N documents (Cochran, Sampling Techniques, chapter 6),

        s^2 = N / (N - 1) * sum_i (b_i - R n_i)^2 / (sum_i n_i)^2

    and NaN for one document.
    """
    sums = {name: documents[name].sum().item() for name in ("nats", "tokens", "bytes", "characters")}
    bits, sizes = documents["nats"].to_numpy() / math.log(2), documents["bytes"].to_numpy()
    count, ratio = len(documents), bits.sum() / sizes.sum()
    spread = math.sqrt(count / (count - 1) * ((bits - ratio * sizes) ** 2).sum()) if count > 1 else math.nan
    nats_per_token = sums["nats"] / sums["tokens"]
    return {
        "nats_per_token": nats_per_token,
        "perplexity": float(np.exp(nats_per_token)),
        "bits_per_byte": float(ratio),
        "bits_per_byte_stderr": spread / sums["bytes"],
        "bits_per_character": float(bits.sum()) / sums["characters"],
        **{name: sums[name] for name in ("tokens", "bytes", "characters")},
        "documents": count,
    }


def record(config: Perplexity, folder: RunFolder, path: Path, trained: Trained, windows: Windows) -> None:
    """Write the totals as table, JSON and a journal row at the step of the checkpoint in `path`."""
    about = {
        "checkpoint": trained.name,
        "asked_in": checkpoints.title(trained),
        "tokenizer": trained.tokenizer.identity,
        "window": windows.length,
        "stride": windows.stride,
    }
    documents = results.load_table([folder], "documents")
    totals = totals_of(documents)
    folder.update(step=len(documents), steps=len(documents))
    results.save_table(folder, "perplexity", pd.DataFrame([about | totals]))
    defined = {name: value for name, value in totals.items() if not math.isnan(value)}  # JSON has no NaN
    replace_file(folder.path / "perplexity.json", json.dumps(about | dict.fromkeys(totals) | defined, indent=2))
    write_journal(config, folder, path, trained, PROBE, defined)
