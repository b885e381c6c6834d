"""Encode documents as token ids, batch by batch and in order, in this process or in several in parallel.

The process that tokenises a batch also hashes it, so that the process that reads and writes does no work per byte.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextvars import ContextVar
from multiprocessing import get_context, parent_process
from typing import NamedTuple

import numpy as np

from mxstudy.data.content_hash import digest_of
from mxstudy.data.corpus import SourceLocation
from mxstudy.data.tokenizer import Tokenizer

AHEAD = 3  # batches per process that are read ahead, before the first is written

_own: ContextVar[tuple[Tokenizer, np.dtype]] = ContextVar("own")  # set when a process of the pool starts


class Batch(NamedTuple):
    """Documents that are tokenised together, and the location in the corpus after the last of them.

    `held_out`: which of them are for validation; None: their hashes say.
    """

    location: SourceLocation
    texts: Sequence[str]
    held_out: Sequence[bool] | None = None


class Encoded(NamedTuple):
    """n encoded documents, concatenated.

    `digests`: n sha256 of 32 bytes. `sizes`: bytes of each document, int64 [n]. `lengths`: tokens of each, EOS
    included, int64 [n]. `ids`: token ids, each document followed by EOS. `held_out`: that of the batch.
    """

    location: SourceLocation
    digests: bytes
    sizes: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    held_out: Sequence[bool] | None


def encode(batch: Batch, tokenizer: Tokenizer, dtype: np.dtype) -> Encoded:
    """Return a batch's documents as token ids, with their hashes."""
    documents = tokenizer.encode_batch(list(batch.texts))
    lengths = np.array([len(ids) + 1 for ids in documents], np.int64)
    ids = np.full(lengths.sum(), tokenizer.eos_id, dtype)
    ends = np.cumsum(lengths)
    for document, start, end in zip(documents, ends - lengths, ends, strict=True):
        ids[start : end - 1] = document
    sizes = np.array([len(text.encode()) for text in batch.texts], np.int64)
    return Encoded(batch.location, b"".join(map(digest_of, batch.texts)), sizes, lengths, ids, batch.held_out)


def encode_all(batches: Iterator[Batch], tokenizer: Tokenizer, dtype: np.dtype, workers: int) -> Iterator[Encoded]:
    """Yield the encoded batches in order, from `workers` processes, or from this one on all cores if 0."""
    if not workers:
        yield from (encode(batch, tokenizer, dtype) for batch in batches)
        return
    context = get_context("spawn")  # a fork would inherit locks that this process's threads hold
    with ProcessPoolExecutor(workers, context, begin, (tokenizer, dtype)) as pool:
        pending: deque[Future[Encoded]] = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(encode_one, batch))
                if len(pending) > AHEAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def begin(tokenizer: Tokenizer, dtype: np.dtype) -> None:
    """Initialise a process of the pool: one thread, ignores Ctrl-C, exits when its parent exits."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # the parent alone decides when to stop
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=leave_with_parent, daemon=True).start()
    _own.set((tokenizer, dtype))


def leave_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def encode_one(batch: Batch) -> Encoded:
    return encode(batch, *_own.get())
