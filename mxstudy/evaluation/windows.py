"""A document as requests: windows slide over it, and each of its tokens is scored once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mxstudy.evaluation.scorer import Request


def sliding_windows(tokens: np.ndarray, eos_id: int, window: int, stride: int) -> Iterator[Request]:
    """The model reads `window` tokens at a time, each time from `stride` tokens further on, to the document's end.

    `tokens`: ids [n], any integer dtype, without EOS. The first is predicted after `eos_id`, as in training, where that
    ends the document before. The first window scores all that it predicts, a later one what none before it has:
    `stride` tokens or, at the end, fewer, each after `window - stride + 1` others or more, so 1 <= stride <= window.
    A document without tokens has none.
    """
    whole = np.concatenate(([eos_id], tokens)).astype(np.int64)
    last = max(len(tokens) - window, 0)  # a window that begins here, or later, reaches the end
    for start in range(0, last + stride, stride) if len(tokens) else ():
        scored = start - stride + window if start else 0
        context, continuation = whole[start : scored + 1], whole[scored + 1 : start + window + 1]
        yield Request(tuple(context.tolist()), tuple(continuation.tolist()))
