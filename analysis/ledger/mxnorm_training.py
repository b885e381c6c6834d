"""List the MXNorm paper's claims about trained models: losses, learning rates, spikes and zero-shot scores."""

from __future__ import annotations

from functools import partial
from math import inf

from analysis.ledger.claim import EVALUATION, PRETRAINING, Claim
from analysis.ledger.costs import like_those_of
from analysis.ledger.rules import Range, Rule, between, equal, higher, lower
from analysis.ledger.training import (
    BestRate,
    Dies,
    Difference,
    Probed,
    Scores,
    at_scale,
    farthest_from_one,
    largest_input,
    reach,
)
from analysis.units import NORM, RATE, WIDTH

POWER = "config.norm.p"
RMS: dict[str, object] = {NORM: "rmsnorm"}
P1 = {NORM: "mxnorm", POWER: 1.0}
P2 = {NORM: "mxnorm", POWER: 2.0}
POST = {NORM: "mxnorm_postround"}
OF_1B: dict[str, object] = {WIDTH: 2048}
PROXY = ("spike_proxy",)
SENSITIVITY = ("lr_sensitivity_paired", "lr_sensitivity")  # the code that has more pairs comes first
WINDOW = (2.0**-5, 2.0**-3)
MARGIN = 0.026
OWN_DIFFERENCE = (MARGIN, "its own difference at 125M, p=2 minus RMSNorm")
# As results/prestated.md has it: Student's 90 % interval, corrected, decides both ways.
stated = partial(Difference, ("mxnorm_equivalence",), baseline=RMS, bootstrapped=False)
ALIKE, ABOVE = Range(-MARGIN, MARGIN, equivalence=True), Range(MARGIN, inf, equivalence=True)
STATED_ALIKE = Rule(f"within ±{MARGIN:g}, stated before ({OWN_DIFFERENCE[1]})", ALIKE, (ABOVE,))
STATED_ABOVE = Rule(f"above {MARGIN:g}, stated before ({OWN_DIFFERENCE[1]})", ABOVE, (ALIKE,))
HALF_OF_P1 = (2.1, "half of p=1's deficit in its table 2")
ONE_SIGMA = (1.0, "one standard deviation for one step, the score's unit")
LARGE = "8B, 315B tokens"
EIGHT = (8.0e9, 314.57e9, 8)
OF_SCORES = like_those_of("olmes_training", 105e6, 3)  # without the evaluations
OF_PROXY = like_those_of("spike_proxy", 1200 * 128 * 1024, 3)

pretraining = partial(Claim, kind=PRETRAINING)

CLAIMS = (
    *(
        pretraining(
            id=f"mxnorm-loss-125m-{name}",
            where="section 4.1, figure 3",
            says=f"around the best learning rate {words} and RMSNorm differ little",
            there="125M, 2.6B tokens",
            arms=f"{words}, RMSNorm",
            judge=stated(arm),
            rule=STATED_ALIKE,
            comparisons=3,
            needs=8,
            page="mxnorm_equivalence",
        )
        for name, words, arm in (("p1", "p=1", P1), ("p2", "p=2", P2))
    ),
    *(
        pretraining(
            id=f"mxnorm-loss-1b-{name}",
            where="section 4.1, figure 3, appendix I",
            says=f"at 1B, too, {words} ends as RMSNorm does at the best learning rate",
            there="1B, 21B tokens",
            arms=f"{words}, RMSNorm",
            judge=at_scale(1.0e9, 20.97e9, 8, Difference(("convergence",), arm | OF_1B, RMS | OF_1B)),
            rule=equal(*OWN_DIFFERENCE),
        )
        for name, words, arm in (("p1", "p=1", P1), ("p2", "p=2", P2))
    ),
    *(
        pretraining(
            id=f"mxnorm-best-rate-{name}",
            where="section 4.1, figure 3",
            says=f"{words} has its best learning rate where RMSNorm has it",
            there="125M, 2.6B tokens",
            arms=f"{words}, RMSNorm",
            judge=BestRate(SENSITIVITY, arm, RMS),
            rule=equal(1.0, "one step of the paper's rates, a factor of 2"),
            comparisons=2,
            page="lr_sensitivity_paired",
        )
        for name, words, arm in (("p1", "p=1", P1), ("p2", "p=2", P2))
    ),
    *(
        pretraining(
            id=f"mxnorm-high-rates-{name}",
            where="section 4.1, figure 3",
            says=f"at 2^-5 and 2^-3, above the best rate, {words} ends higher than RMSNorm",
            there="125M and 1B",
            arms=f"{words}, RMSNorm, at 2^-5 and 2^-3",
            judge=Difference(SENSITIVITY, arm | {RATE: WINDOW}, RMS | {RATE: WINDOW}, over=(RATE,)),
            rule=higher(*OWN_DIFFERENCE),
            comparisons=2,
            page="lr_sensitivity_paired",
        )
        for name, words, arm in (("p1", "p=1", P1), ("p2", "p=2", P2))
    ),
    pretraining(
        id="mxnorm-high-rates-alive",
        where="section 4.1, figure 3",
        says="no rate up to 2^-3 is catastrophic for MXNorm: no run diverges",
        there="125M and 1B",
        arms="p=1 and p=2, all rates",
        judge=Dies(SENSITIVITY, {NORM: "mxnorm"}, over=(RATE, POWER)),
        rule=between(-inf, 0.1, "ours: one run of ten"),
        page="lr_sensitivity_paired",
    ),
    pretraining(
        id="mxnorm-8b-p1",
        where="section 4.1, figure 4",
        says="at 8B p=1 ends higher than RMSNorm (2.175 and 2.132)",
        there=LARGE,
        arms="p=1, RMSNorm",
        judge=at_scale(*EIGHT),
        rule=higher(*OWN_DIFFERENCE),
    ),
    pretraining(
        id="mxnorm-8b-p2",
        where="section 4.1, figure 4",
        says="at 8B p=2 ends as RMSNorm does (2.126 and 2.132)",
        there=LARGE,
        arms="p=2, RMSNorm",
        judge=at_scale(*EIGHT),
        rule=equal(*OWN_DIFFERENCE),
    ),
    Claim(
        id="mxnorm-table-2-p2",
        kind=EVALUATION,
        where="section 4.1, table 2",
        says="p=2 answers as well as RMSNorm in zero-shot tasks",
        there=LARGE,
        arms="p=2, RMSNorm",
        judge=Scores(("olmes_seed0", "olmes_seed1"), ("olmes_training",), P2, RMS),
        rule=equal(*HALF_OF_P1),
        page="olmes",
        cost=OF_SCORES,
    ),
    Claim(
        id="mxnorm-table-2-p1",
        kind=EVALUATION,
        where="section 4.1, table 2",
        says="p=1 answers worse than RMSNorm in zero-shot tasks",
        there=LARGE,
        arms="p=1, RMSNorm",
        judge=Scores(("olmes_seed0", "olmes_seed1"), ("olmes_training",), P1, RMS),
        rule=lower(*HALF_OF_P1),
        page="olmes",
        cost=OF_SCORES,
    ),
    Claim(
        id="mxnorm-table-2-8b",
        kind=EVALUATION,
        where="section 4.1, table 2",
        says="at 8B p=2 and RMSNorm are alike in ten tasks, and p=1 is not",
        there=LARGE,
        arms="p=1, p=2, RMSNorm",
        judge=at_scale(8.0e9, 314.57e9, 12),
        rule=equal(*HALF_OF_P1),
    ),
    *(
        pretraining(
            id=f"mxnorm-spikes-{name}",
            where="section 4.2, appendix J, figure A.3",
            says=f"in the proxy p=1 has higher spike scores than {words}",
            there="250M, 5.2B tokens, 8 runs an arm",
            arms=f"p=1, {words}",
            judge=Difference(PROXY, P1, arm, column="spike_score"),
            rule=higher(*ONE_SIGMA),
            needs=8,
            page="spike_proxy",
            cost=OF_PROXY,
        )
        for name, words, arm in (("rmsnorm", "RMSNorm", RMS), ("p2", "p=2", P2))
    ),
    pretraining(
        id="mxnorm-rms-near-1",
        where="section 4.2, figure 6",
        says="without a spike the RMS of p=1's outputs stays close to 1",
        there="250M, 5.2B tokens",
        arms="p=1",
        judge=Probed(PROXY, "norm_output_rms", farthest_from_one, P1),
        rule=between(-inf, 0.1, "ours: the median norm is never more than 10 % off"),
        page="spike_proxy",
        cost=OF_PROXY,
    ),
    *(
        pretraining(
            id=f"mxnorm-inputs-{name}",
            where="section 4.2, figure 7",
            says=f"the inputs to p=1's norms reach much higher than to {words}'s",
            there="250M, 5.2B tokens",
            arms=f"p=1, {words}",
            judge=Probed(PROXY, "outlier_features", largest_input, P1, arm),
            rule=higher(1.0, "a factor of 2, in log2"),
            page="spike_proxy",
            cost=OF_PROXY,
        )
        for name, words, arm in (("rmsnorm", "RMSNorm", RMS), ("p2", "p=2", P2))
    ),
    *(
        pretraining(
            id=f"mxnorm-reaches-bound-{name}",
            where="section 4.2, figure 7",
            says=f"some norm's outputs reach the bound, for {words}",
            there="250M, 5.2B tokens",
            arms=words,
            judge=Probed(PROXY, "activation_histograms", reach, arm),
            rule=between(0.75, inf, "the last quarter octave below the bound, 0.84, minus a bin's width"),
            page="spike_proxy",
            cost=OF_PROXY,
        )
        for name, words, arm in (("rmsnorm", "RMSNorm", RMS), ("p2", "p=2", P2))
    ),
    pretraining(
        id="mxnorm-outlier-at-spike",
        where="section 4.2, figure 5",
        says="an outlier feature appears in the step in which p=1's first spike starts",
        there=LARGE,
        arms="p=1",
        judge=at_scale(*EIGHT),
        rule=higher(1.0, "a factor of 2, in log2"),
    ),
    pretraining(
        id="mxnorm-postround-worse",
        where="section 3.4, appendix K.3, figure A.4",
        says="with the RMS from rounded scales the loss is higher than RMSNorm's",
        there=LARGE,
        arms="post-round, RMSNorm",
        judge=stated(POST),
        rule=STATED_ABOVE,
        comparisons=3,
        needs=8,
        page="mxnorm_equivalence",
    ),
    pretraining(
        id="mxnorm-postround-8b",
        where="appendix K.3, figure A.4",
        says="at 8B the RMS from rounded scales is unstable",
        there=LARGE,
        arms="post-round, RMSNorm",
        judge=at_scale(*EIGHT),
        rule=higher(*OWN_DIFFERENCE),
    ),
)
