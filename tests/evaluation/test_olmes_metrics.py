from __future__ import annotations

import math

import pytest

from mxstudy.evaluation.metrics import METRICS, bits_per_char, is_right
from mxstudy.evaluation.templates import Question

QUESTION = Question(("q",) * 3, (" a", " bbbb", " \u00e9"), gold=1)
NATS, ALONE = [-2.0, -3.0, -2.5], [-1.0, -4.0, -0.5]


def test_an_option_is_chosen_by_each_metric() -> None:
    assert METRICS["raw"](QUESTION, NATS, ALONE) == NATS
    assert METRICS["per_char"](QUESTION, NATS, ALONE) == [-1.0, -0.6, -1.25]
    assert METRICS["per_byte"](QUESTION, NATS, ALONE) == [-1.0, -0.6, pytest.approx(-2.5 / 3)]
    assert METRICS["uncond"](QUESTION, NATS, ALONE) == [-1.0, 1.0, -2.0]
    right = {metric: is_right(metric, QUESTION, NATS, ALONE) for metric in METRICS}
    assert right == {"raw": False, "per_char": True, "per_byte": True, "uncond": True}


def test_of_equals_the_first_is_chosen() -> None:
    assert not is_right("raw", QUESTION, [-1.0, -1.0, -1.0])
    assert is_right("raw", QUESTION, [-2.0, -1.0, -1.0])


def test_nan_is_no_answer() -> None:
    with pytest.raises(ValueError, match="raw: a log-likelihood of 'q' is NaN"):
        is_right("raw", QUESTION, [-1.0, math.nan, -2.0])


def test_bits_of_the_right_answer_by_its_characters() -> None:
    assert bits_per_char(QUESTION, [0.0, -5.0 * math.log(2), 0.0]) == pytest.approx(1.0)
