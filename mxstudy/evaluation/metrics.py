"""From log-likelihoods of a question's options to whether it is answered right (OLMES, arXiv 2406.08446, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mxstudy.evaluation.templates import Question

Scores = Sequence[float]

# What an option is chosen by: its log-likelihood in nats, the same by characters (its leading space counts) or UTF-8
# bytes, or less its log-likelihood after `UNCONDITIONAL` alone.
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
    """A log-likelihood is NaN: that is no answer, and not a wrong one either."""


def is_right(metric: str, question: Question, nats: Scores, alone: Scores = ()) -> bool:
    """Whether the first of the best options is the right one; `alone` are the unconditional log-likelihoods.

    Raises NotANumber.
    """
    scores = METRICS[metric](question, nats, alone)
    if any(math.isnan(score) for score in scores):
        raise NotANumber(f"{metric}: a log-likelihood of {question.contexts[0][-60:]!r} is NaN: {scores}")
    return scores.index(max(scores)) == question.gold


def bits_per_char(question: Question, nats: Scores) -> float:
    """Of the right answer, its leading space a character: smooth where scores are at chance."""
    return -nats[question.gold] / math.log(2) / len(question.continuations[question.gold])
