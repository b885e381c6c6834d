"""Choose the corpus of each sample of a training: a pure function of (data_seed, step, row), without state.

The samples of a phase are dealt like cards, from one deck after the other. A deck has each corpus's share of its cards,
in an order that the data seed draws; over the whole phase the shares are exact. A corpus counts the samples that it has
given, and continues to count in the next phase, so that none is repeated before all were taken once.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mxstudy.config import Blend
from mxstudy.data.permutation import permute
from mxstudy.reader import key_in, require

DECK, LARGEST_DECK = 2**12, 2**21  # samples; a phase's last deck is up to twice as large
CARDS = 2  # the least number of each corpus in a deck: fewer could be rounded to a negative number
KEPT = 2  # decks: a batch may begin in one and end in the next
LAST_KEY = 2**64 - 1  # decks are keyed downwards from here, so they never share a key with a corpus's epoch


class Sampling:
    """The corpus of each sample of a training over `steps` steps, as `blend` says.

    A phase begins at `from_fraction` times the steps, rounded to the nearest step, and halves to the even one.

    Raises ConfigError for a phase that no step reaches, and for a corpus with too small a share of a phase.
    """

    def __init__(self, blend: Blend, steps: int, batch_size: int, data_seed: int) -> None:
        self.corpora, self.batch_size, self.data_seed = sorted(blend.corpora), batch_size, data_seed
        self.first_steps = [*(round(phase.from_fraction * steps) for phase in blend.phases), steps]
        self.sizes: list[int] = []  # samples of each phase
        self.counts: list[dict[str, int]] = []  # samples of each corpus, by phase
        self.decks: list[int] = []  # size of a deck, by phase
        for number, (phase, (begin, end)) in enumerate(zip(blend.phases, pairwise(self.first_steps), strict=True)):
            where, size = f"data.phases[{number}]", (end - begin) * batch_size
            require(
                size > 0,
                f"{where}: no step reaches it: it begins at step {begin} of {steps}, and has none before the next "
                "phase or the end; raise train.steps, or move from_fraction",
            )
            counts = apportion(phase.weights, size)
            least = min(sorted(counts), key=counts.__getitem__)
            weight = f"{key_in(f'{where}.weights', least)}: {phase.weights[least]:g}"
            deck = max(DECK, -(-CARDS * size // max(counts[least], 1)))
            require(
                counts[least] > 0 and deck <= LARGEST_DECK,
                f"{weight} gives it {counts[least]} of the phase's {size:,} "
                "samples, too few to be spread evenly; raise it, or leave it out",
            )
            self.sizes.append(size)
            self.counts.append(counts)
            self.decks.append(deck)
        self.deck = functools.lru_cache(KEPT)(self.shuffled)

    def deal(self, step: int, rows_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for rows of a step's batch, int64 [B], the corpus of each, by index, and the sample's number in it."""
        phase = self.phase_of(step)
        place_B = rows_B + (step - self.first_steps[phase]) * self.batch_size
        deck_B = self.deck_of(phase, place_B)
        card_B = place_B - deck_B * self.decks[phase]
        corpus_B, number_B = np.empty((2, len(rows_B)), np.int64)
        for deck in np.unique(deck_B).tolist():
            own = deck_B == deck
            corpora, numbers = self.deck(phase, deck)
            corpus_B[own], number_B[own] = corpora[card_B[own]], numbers[card_B[own]]
        return corpus_B, number_B

    def shuffled(self, phase: int, deck: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the cards of a deck in their order: the corpus of each, and its number among that corpus's samples."""
        start, size = deck * self.decks[phase], self.sizes[phase]
        stop = start + self.decks[phase] if self.deck_of(phase, size - 1) > deck else size
        before, after = self.dealt(phase, start), self.dealt(phase, stop)
        index = np.arange(stop - start, dtype=np.uint64)
        key = LAST_KEY - (self.first_steps[phase] * self.batch_size + start)
        order = permute(index, len(index), self.data_seed, np.full_like(index, key))
        corpora = np.repeat(np.arange(len(self.corpora)), after - before)[order.astype(np.int64)]
        numbers = np.empty_like(corpora)
        for corpus, (first, end) in enumerate(zip(before, after, strict=True)):
            numbers[corpora == corpus] = np.arange(first, end)
        return corpora, numbers

    def deck_of(self, phase: int, place: Any) -> Any:
        """Return the deck of a place of a phase, or of an array of places; the last deck has the remainder too."""
        return np.minimum(place // self.decks[phase], max(self.sizes[phase] // self.decks[phase] - 1, 0))

    def dealt(self, phase: int, place: int) -> np.ndarray:
        """Return how many samples each corpus has given before a place of a phase where a deck begins or ends."""
        earlier = [sum(counts.get(name, 0) for counts in self.counts[:phase]) for name in self.corpora]
        ends = accumulate((self.counts[phase].get(name, 0) for name in self.corpora), initial=0)
        edges = [end * place // self.sizes[phase] for end in ends]
        return np.array([given + b - a for given, (a, b) in zip(earlier, pairwise(edges), strict=True)])

    def phase_of(self, step: int) -> int:
        return bisect_right(self.first_steps[1:-1], step)

    def samples_until(self, step: int) -> dict[str, int]:
        """Return the number of samples that each corpus gives in the steps before `step`."""
        phase = self.phase_of(step)
        place = (step - self.first_steps[phase]) * self.batch_size
        deck = int(self.deck_of(phase, place))
        start = deck * self.decks[phase]
        total = self.dealt(phase, start) + np.bincount(
            self.deck(phase, deck)[0][: place - start], minlength=len(self.corpora)
        )
        return dict(zip(self.corpora, total.tolist(), strict=True))

    @property
    def samples(self) -> dict[str, int]:
        """Return the number of samples of each corpus in the whole training."""
        return {name: sum(counts.get(name, 0) for counts in self.counts) for name in self.corpora}


def apportion(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """Return `total` divided in proportion to the weights, in whole numbers, by the largest remainders.

    Equal remainders go by name. The arithmetic is exact.
    """
    whole = sum(map(Fraction, weights.values()))
    quotas = {name: Fraction(weight) * total / whole for name, weight in weights.items()}
    counts = {name: int(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: (counts[name] - quotas[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts
