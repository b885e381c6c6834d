"""Decide from the log-likelihoods of its options whether a question is answered correctly (OLMES, section 3).

OLMES is arXiv 2406.08446.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mxstudy.evaluation.templates import Question

Scores = Sequence[float]

# The score by which an option is chosen: its log-likelihood in nats; the same divided by its number of characters
# (the leading space counts) or UTF-8 bytes; or the same minus its log-likelihood after `UNCONDITIONAL` alone.
UNCONDITIONAL = "Answer:"
METRICS: dict[str, Callable[[Question, Scores, Scores], list[float]]] = {
    "raw": lambda question, nats, alone: list(nats),
    "per_char": lambda question, nats, alone: [x / len(c) for x, c in zip(nats, question.continuations, strict=True)],
    "per_byte": lambda question, nats, alone: [
        x / len(c.encode()) for x, c in zip(nats, question.continuations, strict=True)
    ],
    "uncond": lambda question, nats, alone: [x - y for x, y in zip(nats, alone, strict=True)],
}


class NotANumber(ValueError):
    """A log-likelihood is NaN, so that the answer is neither right nor wrong."""


def is_right(metric: str, question: Question, nats: Scores, alone: Scores = ()) -> bool:
    """Return whether the option with the highest score is the right one; the first counts among equal scores.

    `alone`: the unconditional log-likelihoods, for the metric uncond. Raises NotANumber.
    """
    scores = METRICS[metric](question, nats, alone)
    if any(math.isnan(score) for score in scores):
        raise NotANumber(f"{metric}: a log-likelihood of {question.contexts[0][-60:]!r} is NaN: {scores}")
    return scores.index(max(scores)) == question.gold


def bits_per_char(question: Question, nats: Scores) -> float:
    """Return the right answer's bits per character, leading space included: smooth even where scores are at chance."""
    return -nats[question.gold] / math.log(2) / len(question.continuations[question.gold])
