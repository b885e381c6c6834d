"""Make the parts of the page of the FP4 sweeps: what differs by arm, the casts' noise and clipping, and prices."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import pandas as pd

from analysis.arm_losses import losses
from analysis.fp4.errors import at_the_end
from analysis.fp4.questions import QUESTIONS
from analysis.ledger.claim import NOT_RUN
from analysis.ledger.tables import Tables
from analysis.pages.fp4_operands import BY_OPERAND
from analysis.pages.language_models import LOSS
from analysis.pages.marks import Parts
from analysis.pages.stated_lots import arms, difference, mean_difference, minus, over_bf16, parts, runs_of
from analysis.stated import Question
from analysis.statistics import CONFIDENCE, Effect
from analysis.units import DEPTH, chosen
from mxstudy.results import markdown

PAGE = "fp4_recipes"
SWEEPS = {of.sweep: of for of in QUESTIONS}
ON_H200 = ("fp4_where", "fp4_weight_blocks", "fp4_scales", "fp4_tail", "fp4_four_over_six")  # at one commit
GRADIENTS = "(dgrad|wgrad)_dh"  # a pattern of the output gradients' casts
NOISE, CLIPPED = ("sqnr_db", "{:.1f} dB"), ("overflow_fraction", "{:.1%}")
BY_RECIPE = (("MX", "MXFP4"), ("NV", "NVFP4"))

# what a sentence calls it: the sweep, an arm, the arm that is subtracted, and the sweep of that if it is another one
DIFFERENCES: dict[str, tuple[str, ...]] = {
    "E4M3, 16 minus 32": ("fp4_scales", "E4M3 scales, blocks of 16", "E4M3 scales, blocks of 32"),
    **{
        f"{said}, {recipe}": ("fp4_where", f"{scales} {more}", f"{scales} {less}")
        for scales, recipe in BY_RECIPE
        for said, more, less in (("dgrad beside F", "FD", "F"), ("wgrad beside FD", "FDW", "FD"))
    },
    "none minus last": ("fp4_tail", "none", "last"),
    "last minus first and last": ("fp4_tail", "last", "first and last"),
    **{
        f"four over six, {blocks}": ("fp4_four_over_six", f"{blocks}, four over six", blocks)
        for blocks in ("1 x 16", "16 x 16")
    },
    "four over six, 1 x 16, earlier runs": ("fp4_four_over_six", "1 x 16, four over six", "NV F", "fp4_where"),
    "transform of wgrad": ("fp4_signs", "all +1", "none"),
    "random signs": ("fp4_signs", "by call", "all +1"),
    "signs after the transform": ("fp4_signs", "by call, after", "all +1"),
    "stochastic, floor": ("fp4_clipping", "S, floor", "N, floor"),
    "stochastic, 3/4": ("fp4_clipping", "S, floor, 3/4", "N, floor, 3/4"),
    "stochastic, ceil": ("fp4_clipping", "S, ceil", "N, ceil"),
    "nearest, 3/4": ("fp4_clipping", "N, floor, 3/4", "N, floor"),
    "nearest, ceil": ("fp4_clipping", "N, ceil", "N, floor"),
    **{
        f"transform of the forward, {arm}": ("fp4_forward_hadamard", f"{arm}, H16", arm)
        for arm in ("MX E2M1", "MX E1M2", "NV E2M1", "NV E1M2")
    },
    **{
        f"E1M2 minus E2M1, {recipe}{said}": ("fp4_forward_hadamard", f"{scales} E1M2{of}", f"{scales} E2M1{of}")
        for scales, recipe in BY_RECIPE
        for said, of in ((" with a transform", ", H16"), ("", ""))
    },
    "gain folded": ("fp4_norms", "RMSNorm, folded", "RMSNorm"),
    "MXNorm": ("fp4_norms", "MXNorm", "RMSNorm"),
    "gain in dgrad": ("fp4_norms", "MXNorm, gain in dgrad", "MXNorm"),
    "square blocks": ("fp4_weight_blocks", "16 x 16", "1 x 16, twice"),
    "quantised again": ("fp4_weight_blocks", "1 x 16, again", "1 x 16, twice"),
    **{
        f"stochastic, {transform}, {steps} steps": (
            "fp4_rounding",
            f"S, {transform}, {steps} steps",
            f"N, {transform}, {steps} steps",
        )
        for transform in ("none", "all +1", "by call")
        for steps in (600, 2400)
    },
    **{
        f"transform, {said}": ("fp4_rounding", f"{rounded}, all +1, 2400 steps", f"{rounded}, none, 2400 steps")
        for said, rounded in (("nearest", "N"), ("stochastic", "S"))
    },
    "stochastic minus transform": ("fp4_rounding", "S, none, 2400 steps", "N, all +1, 2400 steps"),
    **{
        f"{arm} over bf16": ("fp4_rounding", arm, f"bf16, {steps}")
        for steps in ("600 steps", "2400 steps")
        for arm in (f"N, none, {steps}", f"S, none, {steps}")
    },
    "whole range": ("fp4_range", "whole range, 24 bits", "16/17, 24 bits"),
    "8 bits": ("fp4_range", "16/17, 8 bits", "16/17, 24 bits"),
}
CLAIMED = {  # what a sentence calls it: the claim that it decides
    "NVFP4 minus MXFP4": "fp4-scales-nv",
    "E4M3 scales minus E8M0": "fp4-scales-format",
    "E8M0, 16 minus 32": "fp4-scales-size",
    "stochastic, ceil over floor": "fp4-clipping-ceil",
    "stochastic, 3/4 over floor": "fp4-clipping-headroom",
    "gain with ceil over floor": "fp4-clipping-explains-ceil",
}
# what a sentence calls it: the sweep, the arm, a pattern of operands, and the statistic of their casts with its format
OF_CASTS = {
    **{
        f"{said} of {arm}": ("fp4_scales", arm, "", statistic)
        for arm in SWEEPS["fp4_scales"].arms
        if arm != "bf16"
        for said, statistic in (("noise", NOISE), ("clipped", CLIPPED))
    },
    **{
        f"noise of {said}, {arm}": ("fp4_four_over_six", arm, f"/{operand}", NOISE)
        for said, operand, blocks in (
            ("inputs", "forward_x", "1 x 16"),
            ("weights", "forward_w", "1 x 16"),
            ("weights", "forward_w", "16 x 16"),
        )
        for arm in (blocks, f"{blocks}, four over six")
    },
    **{
        f"noise of w2's inputs, {arm}{transform}": ("fp4_forward_hadamard", f"{arm}{transform}", "w2/forward_x", NOISE)
        for arm in ("MX E2M1", "NV E2M1", "NV E1M2")
        for transform in ("", ", H16")
    },
    **{
        f"noise of other inputs, {arm}": ("fp4_forward_hadamard", arm, "(wqkv|wo|w13)/forward_x", NOISE)
        for arm in ("MX E2M1", "MX E2M1, H16")
    },
    **{
        f"noise of gradients, {arm}": ("fp4_clipping", arm, f"/{GRADIENTS}", NOISE)
        for arm in ("N, floor, 3/4", "S, floor, 3/4", "N, ceil", "S, ceil")
    },
    **{
        f"clipped of gradients, {arm}": (sweep, arm, f"/{GRADIENTS}", CLIPPED)
        for sweep, names in (
            ("fp4_clipping", ("N, floor", "S, ceil")),
            ("fp4_range", ("whole range, 24 bits", "16/17, 24 bits")),
        )
        for arm in names
    },
}
PRICED = (
    "fp4-tail-first",
    "fp4-four-over-six-rows",
    "fp4-four-over-six-squares",
    "fp4-signs-harm",
    "fp4-clipping-explains-headroom",
    "fp4-rounding-signs",
    "fp4-rounding-harms",
    "fp4-rounding-crosses",
    "fp4-range-clipping",
    "fp4-range-bits",
    "fp4-forward-hadamard-nv",
    "fp4-forward-hadamard-mx",
    "fp4-forward-hadamard-uniform",
    "fp4-norms-mxnorm",
)


def of_casts(sweep: str, arm: str, operands: str, statistic: tuple[str, str]) -> str:
    """Return a statistic of the saturation probe, the mean over operands, linears and runs at the last measurement."""
    runs, measured = runs_of(sweep), Tables().one(sweep, "saturation")
    if runs is None or measured is None:
        return NOT_RUN
    own = measured[measured["fingerprint"].isin(runs.loc[chosen(runs, SWEEPS[sweep].arms[arm]), "fingerprint"])]
    name, form = statistic
    return form.format(at_the_end(own, rf"{operands}/{name}$").mean()).replace("%", " %")


def of_the_forward(sweep: str) -> str:
    """Return a table of the noise and clipping of the forward's operands, a row for each arm that casts any."""
    columns = ["arm", "noise of inputs", "clipped", "noise of weights", "clipped"]
    cells = [
        (arm, *(of_casts(sweep, arm, f"/forward_{x}", statistic) for x in "xw" for statistic in (NOISE, CLIPPED)))
        for arm in SWEEPS[sweep].arms
        if arm != "bf16"
    ]
    return markdown(columns, cells, left=columns[:1])


def described(sweep: str, arm: str, baseline: str, of_baseline: str | None = None) -> str:
    """Return an arm's loss minus another's, with its 95 % interval, whether or not a claim is about these two.

    `of_baseline` is the sweep whose table has the other arm's runs, by default the same.
    """
    found = minus(SWEEPS[sweep], arm, baseline, SWEEPS[of_baseline or sweep])
    if found is None:
        return NOT_RUN
    return with_interval(found)


def with_interval(found: pd.Series) -> str:
    """Return the mean of differences by pair, with its 95 % interval."""
    low, high = Effect(found).interval(CONFIDENCE)
    return f"{found.mean():+.4f} ({low:+.4f} .. {high:+.4f})"


def beyond(one: tuple[str, str], other: tuple[str, str]) -> str:
    """Return by how much one difference between arms of fp4_rounding exceeds another, with its 95 % interval.

    A difference is an arm and the arm that is subtracted. Only seeds that all four arms have are counted.
    """
    first, second = (minus(SWEEPS["fp4_rounding"], *arms_of_it) for arms_of_it in (one, other))
    return NOT_RUN if first is None or second is None else with_interval((first - second).dropna())


def made_twice(*sweeps: str) -> str:
    """Return how many runs these sweeps have from two machines, and how far apart their losses are, by median and most.

    A run with equal losses in two tables counts as one that they share.
    """
    losses_of = [runs.set_index("fingerprint")[LOSS] for runs in map(runs_of, sweeps) if runs is not None]
    apart = pd.concat([(one - other).abs() for one, other in combinations(losses_of, 2)]).dropna()
    largest = apart[apart > 0].groupby(level=0).max()
    return f"{len(largest)}, {largest.median():.4f} nats apart in the median and {largest.max():.4f} at most"


def same_product(arm: str, other: str) -> str:
    """Return the loss of an arm minus that of another with the same products, by pair of seeds: '+0.0001, -0.0002'."""
    found = minus(SWEEPS["fp4_signs"], arm, other)
    assert found is not None
    return ", ".join(f"{value:+.4f}" for value in found)


def price(claim: str) -> str:
    """Return how many pairs would decide a claim, if mean and spread stay: '11 pairs (12 more runs)'."""
    one, found = difference(claim, PAGE)
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


FP4: Parts = {
    **parts(PAGE, *SWEEPS),
    **{f"arms of {of.sweep}": partial(arms, of) for of in QUESTIONS},
    **{said: partial(described, *of) for said, of in DIFFERENCES.items()},
    **{said: partial(of_casts, *of) for said, of in OF_CASTS.items()},
    **{f"price of {claim}": partial(price, claim) for claim in PRICED},
    **{said: partial(mean_difference, claim, PAGE) for said, claim in CLAIMED.items()},
    "casts of fp4_forward_hadamard": partial(of_the_forward, "fp4_forward_hadamard"),
    **BY_OPERAND,
    **{
        f"growth of {said}": partial(
            beyond, *((f"{arm}, {steps} steps", f"{baseline}, {steps} steps") for steps in (2400, 600))
        )
        for said, arm, baseline in (
            ("stochastic minus nearest", "S, none", "N, none"),
            ("nearest over bf16", "N, none", "bf16"),
            ("stochastic over bf16", "S, none", "bf16"),
        )
    },
    **{
        f"stochastic, {signs} beyond none, {steps} steps": partial(
            beyond, *((f"S, {of}, {steps} steps", f"N, {of}, {steps} steps") for of in (signs, "none"))
        )
        for signs in ("all +1", "by call")
        for steps in (600, 2400)
    },
    "none over bf16": partial(over_bf16, SWEEPS["fp4_tail"], "none"),
    "a block of none": partial(share_of_a_block, SWEEPS["fp4_tail"], "none"),
    "no transform over bf16": partial(over_bf16, SWEEPS["fp4_signs"], "none"),
    **{
        f"{gemm} of {recipe}": partial(over_bf16, SWEEPS["fp4_where"], f"{scales} {letter}")
        for scales, recipe in BY_RECIPE
        for gemm, letter in (("forward", "F"), ("dgrad", "D"), ("wgrad", "W"))
    },
    "made twice": partial(made_twice, *ON_H200),
    "made on both kinds": partial(made_twice, "fp4_signs", "fp4_forward_hadamard", "fp4_where"),
    "same product": partial(same_product, "by call, after", "all +1"),
    "same signs": partial(same_product, "by call", "by step"),
}
