"""Split a document into requests by sliding windows, so that each of its tokens is scored once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mxstudy.evaluation.scorer import Request


def sliding_windows(tokens: np.ndarray, eos_id: int, window: int, stride: int) -> Iterator[Request]:
    """Yield one request per window of `window` input tokens; each window starts `stride` tokens after the one before.

    `tokens`: ids [n], any integer dtype, without EOS. The first token is predicted after `eos_id`, as in training,
    where EOS ends the preceding document. The first window scores all tokens that it predicts; each later window scores
    those not scored before: `stride` tokens, or fewer at the end, each with at least `window - stride + 1` tokens of
    context; so 1 <= stride <= window. A document without tokens yields nothing.
    """
    whole = np.concatenate(([eos_id], tokens)).astype(np.int64)
    last = max(len(tokens) - window, 0)  # windows that begin here or later reach the end
    for start in range(0, last + stride, stride) if len(tokens) else ():
        scored = start - stride + window if start else 0
        context, continuation = whole[start : scored + 1], whole[scored + 1 : start + window + 1]
        yield Request(tuple(context.tolist()), tuple(continuation.tolist()))
