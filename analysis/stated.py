"""Define what is stated before a sweep is run: its question, its arms by name, and comparisons of arms, each a claim.

All these sweeps train a 23M Llama, by default with five pairs of seeds per arm and for 600 steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from analysis.ledger.rules import Rule
from analysis.units import STEPS, Arm

PLANNED_PAIRS = 5
STEPS_A_RUN, TOKENS_A_STEP = 600, 64 * 1024


@dataclass(frozen=True)
class Comparison:
    """A claim about two arms. `id` is that of its row in the ledger, `by` who claims it, or where in a document.

    It is about the arm's loss less the baseline's, and `beside`, if given, is a pair of arms whose difference is taken
    off. With `divergences` it is about the fraction of runs that diverge instead. `table` has its runs, if they are not
    among those of the question's sweep: a lot is of one commit and one kind of GPU.
    """

    id: str
    by: str
    says: str
    arm: str
    baseline: str
    rule: Rule
    beside: tuple[str, str] | tuple[()] = ()
    divergences: bool = False
    table: str = ""

    @property
    def pairs(self) -> tuple[str, ...]:
        """Return all arms that it compares."""
        return (self.arm, self.baseline, *self.beside)


@dataclass(frozen=True)
class Question:
    """A question that a sweep answers.

    `sweep` has its runs. `arms` are named as in the figure. `seeds` is the number for each arm. `margin`: the nats
    within which the figure shows arms as alike.
    """

    sweep: str
    asks: str
    arms: Mapping[str, Arm]
    comparisons: tuple[Comparison, ...]
    seeds: range = range(PLANNED_PAIRS)
    margin: float = 0.005


def tokens_of(of: Question, arms: Iterable[str]) -> int:
    """Return on how many tokens one run of each of these arms trains, together."""
    return TOKENS_A_STEP * sum(int(str(of.arms[name].get(STEPS, STEPS_A_RUN))) for name in arms)
