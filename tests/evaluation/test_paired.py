from __future__ import annotations

import math

import numpy as np
import pytest

from mxstudy.evaluation.paired import difference, mcnemar_p
from mxstudy.reader import ConfigError


def test_mcnemar_counts_what_only_one_of_them_knows() -> None:
    """A split of 8 against 1 over 9 differing questions gives twice the tail, (1 + 9) / 2^9."""
    ours = [1.0] * 8 + [0.0] + [1.0, 0.0] * 20
    theirs = [0.0] * 8 + [1.0] + [1.0, 0.0] * 20
    assert mcnemar_p([(ours, theirs)]) == pytest.approx(2 * 10 / 2**9)
    assert mcnemar_p([(theirs, ours)]) == mcnemar_p([(ours, theirs)])
    assert mcnemar_p([(ours, ours)]) == 1.0
    assert mcnemar_p([([0.5, 1.0], [0.0, 1.0])]) is None  # bits per character


def test_the_interval_is_that_of_a_mean() -> None:
    draw = np.random.default_rng(1)
    theirs = draw.normal(size=400)
    ours = theirs + draw.normal(0.3, 1.0, size=400)
    found = difference([(ours.tolist(), theirs.tolist())])
    assert found.value == pytest.approx((ours - theirs).mean())
    half_width = 1.96 * (ours - theirs).std() / math.sqrt(400)
    assert (found.value - found.low, found.high - found.value) == pytest.approx((half_width, half_width), rel=0.1)
    assert found.p is None
    assert found == difference([(ours.tolist(), theirs.tolist())])  # its draws are seeded


@pytest.mark.integration
def test_it_holds_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(2)
    held = 0
    for _ in range(60):
        ours, theirs = draw.random((2, 100)) < [[0.5], [0.4]]
        found = difference([(ours.astype(float).tolist(), theirs.astype(float).tolist())])
        held += found.low <= 0.1 <= found.high
    assert 52 <= held <= 60  # 95 % of 60, within chance


def test_scores_of_different_documents_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot pair 2 documents with 3"):
        difference([([1.0, 0.0], [1.0, 0.0, 1.0])])
    with pytest.raises(ConfigError, match="0 documents"):
        difference([([], [])])


def test_every_subject_counts_once() -> None:
    """One of two documents is better in one subject, one of four worse in the other: the mean of 1/2 and -1/4."""
    large = [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]
    found = difference([([1.0, 1.0], [0.0, 1.0]), large])
    assert (found.value, found.documents, found.p) == (0.125, 6, 1.0)
    assert found.low < 0.125 < found.high


def test_a_single_document_of_a_subject_gives_no_interval() -> None:
    """A single document is drawn again and again, so its interval would be a point."""
    found = difference([([1.0], [0.0]), ([1.0, 0.0, 1.0], [1.0, 1.0, 1.0])])
    assert found.value == pytest.approx((1 - 1 / 3) / 2)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert found.shown(100, 1) == "+33.3"
    assert difference([([1.0, 0.0], [0.0, 0.0])]).shown(100, 1) == "+50.0 [+0.0, +100.0]"
