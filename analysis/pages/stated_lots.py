"""Make the parts of the pages of sweeps whose rules were stated before: verdicts, and losses by arm or learning rate.

Before the runs their tables are missing, and the parts say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial

import pandas as pd

from analysis.arm_losses import losses
from analysis.ledger.claim import NOT_RUN, Judged, judge
from analysis.ledger.documents import DOCUMENTS
from analysis.ledger.instability_language import GAIN, OPERATIONS
from analysis.ledger.page import effect, verdict
from analysis.ledger.rules import CONTRADICTED, REPRODUCED
from analysis.ledger.tables import Tables
from analysis.pages.language_models import LOSS, NORM_CHOICE, NORMS
from analysis.pages.marks import Parts, share_of
from analysis.recipe.arms_23m import FLOOR, OPERANDS, RECIPE, RECIPE_AGAIN
from analysis.stated import Question
from analysis.statistics import Effect
from analysis.units import PLAN, RATE, SEED, chosen, died, ended, power
from mxstudy.results import markdown

PAIRED = "lr_sensitivity_paired"
DECIDED_AGAIN = {  # what differs, and its claim in the second form of recipe_23m
    "scales in E4M3": "recipe-23m-ocp-worse-e4m3-again",
    "scales with E5M2 gradients": "recipe-23m-ocp-worse-e5m2-grad-again",
    "MXFP8": "recipe-mxfp8-is-bf16-small-again",
    "E5M2 weights": "recipe-23m-e5m2-weights-again",
    "E5M2 activations": "recipe-23m-e5m2-activations-again",
}
WORDS = {"fp32": "FP32", "bf16": "bf16", "mx": "MX"}
GAINS = Question(
    "olmo_gains",
    "Do gains in MX, or vector operations in bf16, make MXFP8 diverge in a language model?",
    {
        "bf16": {PLAN: "bf16"},
        **{
            f"MXFP8, gains in {WORDS[gain]}, operations in {WORDS[operations]}": {
                PLAN: "mxfp8",
                GAIN: gain,
                OPERATIONS: operations,
            }
            for operations in ("fp32", "bf16")
            for gain in WORDS
        },
    },
    (),
)


@cache
def judged(name: str) -> list[Judged]:
    """Return the claims that this page describes, with their verdicts."""
    own = [claim for claims in DOCUMENTS.values() for claim in claims if claim.page == name]
    return [judge(claim, Tables()) for claim in own]


def verdicts(name: str) -> str:
    """Return a table of the claims with their verdicts, and below it, once, what is missing and what it would cost."""
    claims = judged(name)
    missing = Counter(effect(one) for one in claims if one.evidence is None)
    lines = [f"- No effect in {count} of {len(claims)} rows: {why}." for why, count in missing.items()]
    return "\n".join([verdict_table(claims), "", *lines])


def verdict_table(claims: Iterable[Judged]) -> str:
    """Return a table of claims with their units, effects and verdicts."""
    cells = [
        (
            one.claim.id,
            one.claim.says,
            one.units or "-",
            effect(one).replace("|", "\\|") if one.evidence else "-",
            verdict(one),
        )
        for one in claims
    ]
    return markdown(("row", "claim", "n", "effect", "verdict"), cells, left=("row", "claim", "effect", "verdict"))


def decided(name: str) -> str:
    """Return how many of the claims are reproduced or contradicted: '7 of 13'."""
    return f"{sum(one.counted_as in (REPRODUCED, CONTRADICTED) for one in judged(name))} of {len(judged(name))}"


def runs_of(name: str) -> pd.DataFrame | None:
    """Return the runs of a sweep that ended, or None before they were exported."""
    runs = Tables().one(name, "runs")
    return None if runs is None else ended(runs)


def finished(*sweeps: str) -> str:
    """Return how many runs of these sweeps finished, of those that ended: '24 of 25'. A shared run counts once."""
    tables = [runs for runs in map(runs_of, sweeps) if runs is not None]
    if not tables:
        return NOT_RUN
    runs = pd.concat(tables).drop_duplicates("fingerprint")
    return f"{(runs['state'] == 'finished').sum()} of {len(runs)}"


def arms(of: Question) -> str:
    """Return a table of the arms with their mean losses and differences from bf16.

    An arm whose runs are in a comparison's own table has no difference: bf16 was not made beside it.
    """
    runs = runs_of(of.sweep)
    if runs is None:
        return NOT_RUN
    less, cells = losses(of, runs), list[tuple[str, ...]]()
    beside = {name: one.table for one in of.comparisons if one.table for name in one.pairs}
    for name, arm in of.arms.items():
        own = runs[chosen(runs, arm)]
        if own.empty and name in beside and (others := runs_of(beside[name])) is not None:
            own = others[chosen(others, arm)]
        if own.empty:
            cells.append((name, NOT_RUN, "", "", ""))
            continue
        alive = own.loc[~died(own, LOSS), LOSS]
        pairs = less[name].units if name in less else pd.Series(dtype=float)
        spread = [f"{pairs.mean():+.4f}", f"{pairs.min():+.4f} .. {pairs.max():+.4f}"] if len(pairs) else ["", ""]
        cells.append((name, f"{len(alive)} of {len(own)}", f"{alive.mean():.4f}", *spread))
    return markdown(("arm", "finished", "mean loss", "minus bf16", "least .. most"), cells, left=["arm"])


def over_bf16(of: Question, arm: str) -> str:
    """Return by how much an arm ends above bf16, on average over its pairs, in nats a token: '+0.0549'."""
    runs = runs_of(of.sweep)
    found = {} if runs is None else losses(of, runs)
    return f"{found[arm].value:+.4f}" if arm in found else NOT_RUN


def minus(of: Question, one: str, other: str, of_other: Question | None = None) -> pd.Series | None:
    """Return the loss of an arm minus that of another, by pair of seeds, or None before the runs were exported.

    `of_other` is the question whose table has the other arm's runs, by default the same.
    """
    losses_of = []
    for whose, name in ((of, one), (of_other or of, other)):
        runs = runs_of(whose.sweep)
        if runs is None:
            return None
        losses_of.append(runs[chosen(runs, whose.arms[name])].set_index(SEED)[LOSS])
    return (losses_of[0] - losses_of[1]).dropna()


def rounded_down(of: Question) -> str:
    """Return in how many pairs the run with scales rounded down ends above that with scales rounded up: '16 of 16'."""
    pairs = [minus(of, f"{name}{FLOOR}", name) for name in OPERANDS if f"{name}{FLOOR}" in of.arms]
    found = [one for one in pairs if one is not None]
    return share_of(pd.concat(found) > 0) if found else NOT_RUN


def difference(claim: str, page: str = RECIPE.sweep) -> tuple[Judged, Effect | None]:
    """Return a claim of a page with its verdict, and the difference that decides it; None if it was not run."""
    (one,) = [one for one in judged(page) if one.claim.id == claim]
    found = one.evidence and one.evidence.found
    return one, found if isinstance(found, Effect) else None


def mean_difference(claim: str, page: str = RECIPE.sweep) -> str:
    """Return the mean of the difference that decides a claim, in nats a token: '+0.0059'."""
    _, found = difference(claim, page)
    return NOT_RUN if found is None else f"{found.value:+.4f}"


def at_most(claim: str) -> str:
    """Return the upper end of the interval of two one-sided tests of a difference, in nats a token: '+0.0048'."""
    one, found = difference(claim)
    return NOT_RUN if found is None else f"{found.interval(1 - 2 * one.claim.rate)[1]:+.4f}"


def needed_units(claim: str) -> str:
    """Return for how many of a claim's units the verdict changes if that unit is left out: '10 of 11'."""
    one, found = difference(claim)
    if found is None:
        return NOT_RUN
    without = [replace(found, units=found.units.drop(unit)) for unit in found.units.index]
    whole = one.claim.rule.verdict(found, one.claim.rate)
    return share_of(pd.Series([one.claim.rule.verdict(less, one.claim.rate) != whole for less in without]))


def by_rate(name: str) -> str:
    """Return a table of the mean losses by learning rate and norm, and of MXNorm's loss minus RMSNorm's."""
    runs = runs_of(name)
    if runs is None:
        return NOT_RUN
    cells = []
    for rate, own in runs.groupby(RATE):
        found = own.assign(**{LOSS: own[LOSS].mask(died(own, LOSS))}).pivot(
            index=SEED, columns=NORM_CHOICE, values=LOSS
        )
        less = [found[norm] - found["rmsnorm"] for norm in NORMS if norm != "rmsnorm"]
        said = [f"{one.mean():+.3f} ({one.min():+.3f} .. {one.max():+.3f})" for one in less]
        cells.append((power(rate), *(f"{found[norm].mean():.3f}" for norm in NORMS), *said))
    words = [f"{NORMS[norm]} minus RMSNorm, least .. most" for norm in NORMS if norm != "rmsnorm"]
    return markdown(("lr", *NORMS.values(), *words), cells, left=["lr"])


def parts(name: str, *sweeps: str) -> Parts:
    """Return the parts of each of these pages. `sweeps` have its runs, by default the one of its name."""
    return {
        "decided": partial(decided, name),
        "verdicts": partial(verdicts, name),
        "finished": partial(finished, *(sweeps or (name,))),
    }


RECIPE_23M: Parts = {
    **parts(RECIPE.sweep),
    "arms": partial(arms, RECIPE),
    "rounded down": partial(rounded_down, RECIPE),
    "arms again": partial(arms, RECIPE_AGAIN),
    "rounded down again": partial(rounded_down, RECIPE_AGAIN),
    **{f"by {words}": partial(mean_difference, claim) for words, claim in DECIDED_AGAIN.items()},
    "by blocks of 128": partial(mean_difference, "recipe-23m-fp8-blockwise"),
    "by blocks of 128 again": partial(mean_difference, "recipe-23m-fp8-blockwise-again"),
    "MXFP8 at most": partial(at_most, DECIDED_AGAIN["MXFP8"]),
    **{f"pairs that {words} needs": partial(needed_units, DECIDED_AGAIN[words]) for words in ("MXFP8", "E5M2 weights")},
    "finished again": partial(finished, RECIPE_AGAIN.sweep),
}
OLMO_GAINS: Parts = {**parts(GAINS.sweep), "arms": partial(arms, GAINS)}
LR_PAIRED: Parts = {**parts(PAIRED), "losses": partial(by_rate, PAIRED)}
