"""A sample's corpus follows exact shares, phases and decks, and does not depend on the order of asking."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from each import each

from mxstudy.config import Blend, Phase, PySource, blend_of
from mxstudy.data import sampling
from mxstudy.data.sampling import Sampling, apportion
from mxstudy.reader import ConfigError

A, B = PySource(), PySource(include_site_packages=True)
TWO = Blend(
    corpora={"b": B, "a": A},
    phases=(Phase(weights={"a": 3, "b": 1}), Phase(from_fraction=0.6, weights={"b": 1})),
)


def dealt(samples: Sampling, steps: range) -> list[tuple[str, int]]:
    """Return the corpus and number of each sample of these steps, in order."""
    rows = np.arange(samples.batch_size)
    found = []
    for step in steps:
        corpora, numbers = samples.deal(step, rows)
        found += [
            (samples.corpora[one], number) for one, number in zip(corpora.tolist(), numbers.tolist(), strict=True)
        ]
    return found


@pytest.fixture(params=[4096, 8, 10, 1000])
def deck(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the size of decks that hold a whole phase, or a part of a batch."""
    monkeypatch.setattr(sampling, "DECK", request.param)
    return int(request.param)


def test_one_corpus_is_taken_in_order(deck: int) -> None:
    assert dealt(Sampling(blend_of(A), 30, 16, data_seed=5), range(30)) == [("pysource", n) for n in range(480)]


def test_shares_are_exact_in_each_phase(deck: int) -> None:
    samples = Sampling(TWO, 50, 16, data_seed=0)
    first, second = (Counter(name for name, _ in dealt(samples, part)) for part in (range(30), range(30, 50)))
    assert first == {"a": 360, "b": 120}
    assert second == {"b": 320}
    assert samples.samples == {"a": 360, "b": 440}


@pytest.mark.parametrize(("steps", "start"), [(5, 2), (6, 3), (7, 4)])
def test_a_phase_begins_at_the_nearest_step_and_halves_at_the_even_one(steps: int, start: int) -> None:
    phases = (Phase(weights={"a": 1}), Phase(from_fraction=0.5, weights={"b": 1}))
    found = dealt(Sampling(Blend(corpora={"b": B, "a": A}, phases=phases), steps, 1, data_seed=0), range(steps))
    assert [name for name, _ in found] == ["a"] * start + ["b"] * (steps - start)


def test_every_sample_of_a_corpus_is_taken_once_across_the_phases(deck: int) -> None:
    found = dealt(Sampling(TWO, 50, 16, data_seed=0), range(50))
    for name, total in (("a", 360), ("b", 440)):
        assert [number for one, number in found if one == name] == list(range(total))


def test_a_sample_is_a_function_of_seed_step_and_row(deck: int) -> None:
    whole = dealt(Sampling(TWO, 50, 16, data_seed=1), range(50))
    fresh = Sampling(TWO, 50, 16, data_seed=1)
    for step in (49, 0, 30, 29, 31, 7):
        for start, stop in ((0, 16), (3, 4), (8, 16)):
            corpora, numbers = fresh.deal(step, np.arange(start, stop))
            asked = list(zip((fresh.corpora[one] for one in corpora), numbers.tolist(), strict=True))
            assert asked == whole[step * 16 + start : step * 16 + stop]


def test_the_order_is_drawn_by_the_data_seed() -> None:
    orders = {tuple(dealt(Sampling(TWO, 50, 16, data_seed=seed), range(30))) for seed in range(4)}
    assert len(orders) == 4
    again = Sampling(Blend(corpora=dict(reversed(TWO.corpora.items())), phases=TWO.phases), 50, 16, data_seed=0)
    assert tuple(dealt(again, range(30))) in orders  # the order of a mapping is not in a fingerprint


@pytest.mark.integration
def test_samples_are_mixed_within_a_deck_and_shares_hold_for_each(deck: int) -> None:
    blend = Blend(corpora={"a": A, "b": B}, phases=(Phase(weights={"a": 0.7, "b": 0.3}),))
    found = [name for name, _ in dealt(Sampling(blend, 200, 10, data_seed=0), range(200))]
    assert max(abs(found[:n].count("a") - 0.7 * n) for n in range(2000)) < (80 if deck > 10 else 12)
    changes = sum(one != other for one, other in pairwise(found))
    assert 2 * 0.7 * 0.3 * 2000 * 0.85 < changes < 2 * 0.7 * 0.3 * 2000 * 1.3


@each("step", [0, 1, 7, 29, 30, 31, 49, 50])
def test_samples_until_a_step_are_those_that_were_dealt(step: int) -> None:
    samples = Sampling(TWO, 50, 16, data_seed=0)
    counted = Counter(name for name, _ in dealt(samples, range(step)))
    assert samples.samples_until(step) == {"a": counted["a"], "b": counted["b"]}


def test_a_small_weight_makes_larger_decks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "DECK", 8)
    blend = Blend(corpora={"a": A, "b": B}, phases=(Phase(weights={"a": 1, "b": 99}),))
    samples = Sampling(blend, 100, 10, data_seed=0)
    assert samples.decks == [200]
    found = dealt(samples, range(100))
    assert [number for name, number in found if name == "a"] == list(range(10))
    assert [Counter(name for name, _ in found[start : start + 200])["a"] for start in range(0, 1000, 200)] == [2] * 5


def test_a_corpus_as_large_as_that_of_the_recipe_needs_no_table() -> None:
    """15 trillion tokens in windows of 8192 need no table."""
    samples = Sampling(TWO, 2_384_186, 768, data_seed=0)
    assert sum(samples.samples_until(2_000_000).values()) == 2_000_000 * 768
    assert len(dealt(samples, range(2_384_185, 2_384_186))) == 768


@each(
    ("phases", "steps", "message"),
    [
        ([(0, {"a": 1}), (0.6, {"b": 1})], 1, r"data\.phases\[1\]: no step reaches it: it begins at step 1 of 1"),
        ([(0, {"a": 1}), (0.04, {"b": 1})], 10, r"data\.phases\[0\]: no step reaches it: it begins at step 0 of 10"),
        (
            [(0, {"a": 1, "b": 1e-3})],
            10,
            r"data\.phases\[0\]\.weights\.b: 0\.001 gives it 0 of the phase's 100 samples, too few",
        ),
        (
            [(0, {"a": 1, "b": 1e-7})],
            10**7,
            r"data\.phases\[0\]\.weights\.b: 1e-07 gives it 10 of the phase's 100,000,000 samples, too few",
        ),
    ],
)
def test_what_gets_no_sample_is_refused(phases: list[tuple[float, dict[str, float]]], steps: int, message: str) -> None:
    used = {name for _, weights in phases for name in weights}
    blend = Blend(
        corpora={name: one for name, one in (("a", A), ("b", B)) if name in used},
        phases=tuple(Phase(from_fraction=start, weights=weights) for start, weights in phases),
    )
    with pytest.raises(ConfigError, match=message):
        Sampling(blend, steps, 10, data_seed=0)


def test_a_number_is_divided_by_the_largest_remainders() -> None:
    assert apportion({"c": 1, "a": 1, "b": 1}, 10) == {"a": 4, "b": 3, "c": 3}
    assert apportion({"a": 0.6, "b": 0.3, "c": 0.1}, 64) == {"a": 38, "b": 19, "c": 7}  # 38.4, 19.2, 6.4
    assert apportion({"a": 2.0}, 7) == {"a": 7}
    assert apportion({"a": 1, "b": 10**12}, 5) == {"a": 0, "b": 5}
