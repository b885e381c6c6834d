"""Make the parts of the pages of sweeps whose rules were stated before: verdicts, and losses by arm or learning rate.

Before the runs their tables are missing, and the parts say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import combinations

import pandas as pd

from analysis.arm_losses import losses
from analysis.fp4.errors import at_the_end
from analysis.fp4.questions import QUESTIONS
from analysis.ledger.claim import NOT_RUN, Judged, judge
from analysis.ledger.documents import DOCUMENTS
from analysis.ledger.instability_language import GAIN, OPERATIONS
from analysis.ledger.page import effect, verdict
from analysis.ledger.rules import CONTRADICTED, REPRODUCED
from analysis.ledger.tables import RESULTS, Tables
from analysis.pages.language_models import LOSS, NORM, NORMS
from analysis.pages.marks import Parts, share_of
from analysis.recipe.arms_23m import FLOOR, OPERANDS, RECIPE, RECIPE_AGAIN
from analysis.stated import Question
from analysis.statistics import CONFIDENCE, Effect
from analysis.units import DEPTH, PLAN, RATE, SEED, chosen, died, ended, power
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
    return [judge(claim, Tables(RESULTS)) for claim in own]


def verdicts(name: str) -> str:
    """Return a table of the claims with their verdicts, and below it, once, what is missing and what it would cost."""
    claims = judged(name)
    missing = Counter(one.why for one in claims if one.evidence is None)
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
    runs = Tables(RESULTS).one(name, "runs")
    return None if runs is None else ended(runs)


def finished(*sweeps: str) -> str:
    """Return how many runs of these sweeps finished, of those that ended: '24 of 25'. A shared run counts once."""
    tables = [runs for runs in map(runs_of, sweeps) if runs is not None]
    if not tables:
        return NOT_RUN
    runs = pd.concat(tables).drop_duplicates("fingerprint")
    return f"{(runs['state'] == 'finished').sum()} of {len(runs)}"


def arms(of: Question) -> str:
    """Return a table of the arms with their mean losses and differences from bf16."""
    runs = runs_of(of.sweep)
    if runs is None:
        return NOT_RUN
    less, cells = losses(of, runs), list[tuple[str, ...]]()
    for name, arm in of.arms.items():
        own = runs[chosen(runs, arm)]
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


def of_casts(of: Question, arm: str, statistic: str, form: str) -> str:
    """Return a statistic of the saturation probe, the mean over operands, linears and runs at the last measurement."""
    runs, measured = runs_of(of.sweep), Tables(RESULTS).one(of.sweep, "saturation")
    if runs is None or measured is None:
        return NOT_RUN
    own = measured[measured["fingerprint"].isin(runs.loc[chosen(runs, of.arms[arm]), "fingerprint"])]
    return form.format(at_the_end(own, rf"/{statistic}$").mean()).replace("%", " %")


def described(sweep: str, arm: str, baseline: str, of_baseline: str | None = None) -> str:
    """Return an arm's loss minus another's, with its 95 % interval, whether or not a claim is about these two.

    `of_baseline` is the sweep whose table has the other arm's runs, by default the same.
    """
    found = minus(BY_FP4_SWEEP[sweep], arm, baseline, BY_FP4_SWEEP[of_baseline or sweep])
    if found is None:
        return NOT_RUN
    low, high = Effect(found).interval(CONFIDENCE)
    return f"{found.mean():+.4f} ({low:+.4f} .. {high:+.4f})"


def made_twice(*sweeps: str) -> str:
    """Return how many runs these sweeps have from two machines, and how far apart their losses are, by median and most.

    A run with equal losses in two tables counts as one that they share.
    """
    losses_of = [runs.set_index("fingerprint")[LOSS] for runs in map(runs_of, sweeps) if runs is not None]
    apart = pd.concat([(one - other).abs() for one, other in combinations(losses_of, 2)]).dropna()
    largest = apart[apart > 0].groupby(level=0).max()
    return f"{len(largest)}, {largest.median():.4f} nats apart in the median and {largest.max():.4f} at most"


def same_product() -> str:
    """Return the loss of an arm minus that of another with the same products, by pair of seeds: '+0.0001, -0.0002'."""
    found = minus(BY_FP4_SWEEP["fp4_signs"], "by call, after", "all +1")
    assert found is not None
    return ", ".join(f"{value:+.4f}" for value in found)


def price(claim: str, page: str) -> str:
    """Return how many pairs would decide a claim, if mean and spread stay: '11 pairs (12 more runs)'."""
    one, found = difference(claim, page)
    if found is None:
        return NOT_RUN
    needed = one.claim.rule.needed(found, one.claim.rate)
    if needed is None:
        return "more pairs than were looked for"
    arms_of_it = {*one.claim.arms.split("; ")}
    return f"{needed} pairs ({(needed - found.count) * len(arms_of_it)} more runs)"


def share_of_a_block(of: Question, arm: str) -> str:
    """Return what each block costs if all cost the same: an arm's loss minus bf16's, over the number of blocks."""
    runs = runs_of(of.sweep)
    if runs is None:
        return NOT_RUN
    found = losses(of, runs)
    return f"{found[arm].value / runs[DEPTH].iloc[0]:+.4f}" if arm in found else NOT_RUN


def by_rate(name: str) -> str:
    """Return a table of the mean losses by learning rate and norm, and of MXNorm's loss minus RMSNorm's."""
    runs = runs_of(name)
    if runs is None:
        return NOT_RUN
    cells = []
    for rate, own in runs.groupby(RATE):
        found = own.assign(**{LOSS: own[LOSS].mask(died(own, LOSS))}).pivot(index=SEED, columns=NORM, values=LOSS)
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
    "MXFP8 at most": partial(at_most, DECIDED_AGAIN["MXFP8"]),
    **{f"pairs that {words} needs": partial(needed_units, DECIDED_AGAIN[words]) for words in ("MXFP8", "E5M2 weights")},
    "finished again": partial(finished, RECIPE_AGAIN.sweep),
}
OLMO_GAINS: Parts = {**parts(GAINS.sweep), "arms": partial(arms, GAINS)}
FP4_PAGE = "fp4_recipes"
BY_FP4_SWEEP = {of.sweep: of for of in QUESTIONS}
GRADIENTS = "(dgrad|wgrad)_dh"  # a pattern of the output gradients' casts
ON_H100 = ("fp4_signs", "fp4_clipping", "fp4_range")  # the others are of H200
FP4: Parts = {
    **parts(FP4_PAGE, *BY_FP4_SWEEP),
    "made twice": partial(made_twice, *(sweep for sweep in BY_FP4_SWEEP if sweep not in ON_H100)),
    "NVFP4 minus MXFP4": partial(mean_difference, "fp4-scales-nv", FP4_PAGE),
    "E4M3 scales minus E8M0": partial(mean_difference, "fp4-scales-format", FP4_PAGE),
    "E8M0, 16 minus 32": partial(mean_difference, "fp4-scales-size", FP4_PAGE),
    "E4M3, 16 minus 32": partial(described, "fp4_scales", "E4M3 scales, blocks of 16", "E4M3 scales, blocks of 32"),
    **{
        f"{said}, {recipe}": partial(described, "fp4_where", f"{scales} {more}", f"{scales} {less}")
        for scales, recipe in (("MX", "MXFP4"), ("NV", "NVFP4"))
        for said, more, less in (("dgrad beside F", "FD", "F"), ("wgrad beside FD", "FDW", "FD"))
    },
    **{
        f"{said} of {arm}": partial(of_casts, BY_FP4_SWEEP["fp4_scales"], arm, statistic, form)
        for arm in BY_FP4_SWEEP["fp4_scales"].arms
        if arm != "bf16"
        for said, statistic, form in (("noise", "sqnr_db", "{:.1f} dB"), ("clipped", "overflow_fraction", "{:.1%}"))
    },
    "none minus last": partial(described, "fp4_tail", "none", "last"),
    "last minus first and last": partial(described, "fp4_tail", "last", "first and last"),
    "none over bf16": partial(over_bf16, BY_FP4_SWEEP["fp4_tail"], "none"),
    "a block of none": partial(share_of_a_block, BY_FP4_SWEEP["fp4_tail"], "none"),
    **{
        f"four over six, {blocks}": partial(described, "fp4_four_over_six", f"{blocks}, four over six", blocks)
        for blocks in ("1 x 16", "16 x 16")
    },
    "four over six, 1 x 16, earlier runs": partial(
        described, "fp4_four_over_six", "1 x 16, four over six", "NV F", "fp4_where"
    ),
    **{
        f"noise of {said}, {arm}": partial(
            of_casts, BY_FP4_SWEEP["fp4_four_over_six"], arm, f"{operand}/sqnr_db", "{:.1f} dB"
        )
        for said, operand, blocks in (
            ("inputs", "forward_x", "1 x 16"),
            ("weights", "forward_w", "1 x 16"),
            ("weights", "forward_w", "16 x 16"),
        )
        for arm in (blocks, f"{blocks}, four over six")
    },
    "transform of wgrad": partial(described, "fp4_signs", "all +1", "none"),
    "no transform over bf16": partial(over_bf16, BY_FP4_SWEEP["fp4_signs"], "none"),
    "random signs": partial(described, "fp4_signs", "by call", "all +1"),
    "signs after the transform": partial(described, "fp4_signs", "by call, after", "all +1"),
    "same product": same_product,
    **{
        f"stochastic, {said}": partial(described, "fp4_clipping", f"S, {scales}", f"N, {scales}")
        for said, scales in (("clipped", "floor"), ("3/4", "floor, 3/4"), ("rounded up", "ceil"))
    },
    "nearest, 3/4": partial(described, "fp4_clipping", "N, floor, 3/4", "N, floor"),
    "nearest, rounded up": partial(described, "fp4_clipping", "N, ceil", "N, floor"),
    **{
        f"noise of gradients, {arm}": partial(
            of_casts, BY_FP4_SWEEP["fp4_clipping"], arm, f"{GRADIENTS}/sqnr_db", "{:.1f} dB"
        )
        for arm in ("N, floor, 3/4", "S, floor, 3/4", "N, ceil", "S, ceil")
    },
    "whole range": partial(described, "fp4_range", "whole range, 24 bits", "16/17, 24 bits"),
    "8 bits": partial(described, "fp4_range", "16/17, 8 bits", "16/17, 24 bits"),
    **{
        f"clipped of gradients, {arm}": partial(
            of_casts, BY_FP4_SWEEP[sweep], arm, f"{GRADIENTS}/overflow_fraction", "{:.1%}"
        )
        for sweep, names in (
            ("fp4_clipping", ("N, floor", "S, ceil")),
            ("fp4_range", ("whole range, 24 bits", "16/17, 24 bits")),
        )
        for arm in names
    },
    "made on both kinds": partial(made_twice, "fp4_signs", "fp4_where"),
    **{
        f"price of {claim}": partial(price, claim, FP4_PAGE)
        for claim in (
            "fp4-tail-first",
            "fp4-four-over-six-rows",
            "fp4-four-over-six-squares",
            "fp4-signs-harm",
            "fp4-clipping-explains-headroom",
            "fp4-range-clipping",
            "fp4-range-bits",
        )
    },
    **{f"arms of {of.sweep}": partial(arms, of) for of in QUESTIONS},
    **{
        f"{gemm} of {recipe}": partial(over_bf16, QUESTIONS[0], f"{scales} {letter}")
        for scales, recipe in (("MX", "MXFP4"), ("NV", "NVFP4"))
        for gemm, letter in (("forward", "F"), ("dgrad", "D"), ("wgrad", "W"))
    },
}
LR_PAIRED: Parts = {**parts(PAIRED), "losses": partial(by_rate, PAIRED)}
