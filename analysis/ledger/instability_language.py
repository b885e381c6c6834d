"""List the instability paper's claims about language models: sections 3 and 6, appendices F to J."""

from __future__ import annotations

from functools import partial
from math import inf

from analysis import stated
from analysis.ledger.claim import PRETRAINING, Claim
from analysis.ledger.costs import like_those_of
from analysis.ledger.rules import between, equal, higher, lower
from analysis.ledger.training import Dies, Difference, Probed, at_scale, fullest_last_bin
from analysis.recipe.arms_23m import RECIPE
from analysis.units import DEPTH, PLAN, RATE, STEPS, WIDTH

BF16 = {PLAN: "bf16"}
SIZES = ("config.model.num_heads", STEPS, WIDTH, DEPTH)
GRID, PAIRS, AFFINE, MITIGATIONS = (
    ("olmo_precision_grid",),
    ("unstable_pairs",),
    ("layernorm_affine",),
    ("mitigations",),
)
OF_SIZES = (0.1, "ours: one run of ten")
RESOLUTION = (0.005, "the resolution of its tables' losses")
WIDE = "20M to 1.7B, 2e17 to 4.8e19 FLOPs, about 70 models a format"
# The largest of the paper's models: 1.74 billion parameters for 4.84e19 FLOPs; four pairs.
LARGEST = (1.74e9, 4.84e19 / (6 * 1.74e9), 8)
AT_2E_4 = {PLAN: "mxfp8", RATE: 2e-4}
STARCODER, ON_CODE = ("unstable_pairs_starcoder",), {"choice.data": "starcoder"}
# Figure 12: n = 9, 73 million parameters, 50,000 steps of 262,144 tokens; four pairs.
FIGURE_12 = (7.27e7, 50_000 * 262_144, 8)

# Appendix H: about 12 sizes at each of six budgets, which add up to 1.82e19 FLOPs, and 10 at two of 7.04e19. One
# parameter stands for all, so that 6 N D are the FLOPs of a model in the mean.
COUNT = 12 * 6 + 10 * 2
ALL_SIZES, ALL_SIZES_TWICE = ((1.0, (12 * 1.82e19 + 10 * 7.04e19) / 6 / COUNT, formats * COUNT) for formats in (1, 2))

claim = partial(Claim, kind=PRETRAINING, there=WIDE)

UNSTABLE = {
    "e5m2": ("E5M2 in weights and activations", "section 3.2, figure 1b", {PLAN: "mxfp8_e5m2"}, GRID),
    "e4m3": ("E4M3 in weights and activations", "appendix J, figure 18", {PLAN: "mxfp8"}, PAIRS),
    "e5m2-e4m3": ("E5M2 weights with E4M3 activations", "appendix J, figure 19a", {PLAN: "mxfp8_e5m2_weight"}, PAIRS),
    "e4m3-e5m2": ("E4M3 weights with E5M2 activations", "appendix J, figure 19b", {PLAN: "mxfp8_e5m2_act"}, PAIRS),
    "e2m3": ("E2M3 in weights and activations", "appendix J, figure 20", {PLAN: "mxfp6_e2m3"}, PAIRS),
    "e3m2": ("E3M2 in weights and activations", "appendix J, figure 20", {PLAN: "mxfp6_e3m2"}, PAIRS),
}
STABLE = {
    "e4m3-bf16": ("E4M3 weights with bf16 activations", {PLAN: "mxfp8_bf16_act"}),
    "e5m2-bf16": ("E5M2 weights with bf16 activations", {PLAN: "mxfp8_e5m2_bf16_act"}),
    "e2m3-bf16": ("E2M3 weights with bf16 activations", {PLAN: "mxfp6_e2m3_bf16_act"}),
    "e4m3-forward": ("E4M3 in the forward alone", {PLAN: "mxfp8_forward_only"}),
    "e5m2-forward": ("E5M2 in the forward alone", {PLAN: "mxfp8_e5m2_forward_only"}),
}

HAS_GAIN = "config.norm.affine"
GAINS, GAIN, OPERATIONS = ("olmo_gains",), "config.precision.gain", "config.precision.vector_ops"
IN_FP32 = {PLAN: "mxfp8", GAIN: "fp32", OPERATIONS: "fp32"}
OF_GAINS = like_those_of("olmo_gains", 1221 * 64 * 512, 7)  # the seven arms of the sweep
SMALL = "20M to 1.7B"

CLAIMS = (
    claim(
        id="instability-lm-gain-mx",
        where="section 5.1",
        says="with the norms' gains in MX models diverge more often than with gains in FP32",
        there=SMALL,
        arms="E4M3: gains in MX, in FP32",
        judge=Dies(GAINS, {**IN_FP32, GAIN: "mx"}, IN_FP32),
        cost=OF_GAINS,
        rule=higher(*OF_SIZES),
        page="olmo_gains",
    ),
    claim(
        id="instability-lm-gain-loss",
        where="section 5.1",
        says="with the norms' gains in MX models end higher than with gains in FP32",
        there=SMALL,
        arms="E4M3: gains in MX, in FP32",
        judge=Difference(GAINS, {**IN_FP32, GAIN: "mx"}, IN_FP32),
        cost=OF_GAINS,
        rule=higher(*RESOLUTION),
        page="olmo_gains",
    ),
    claim(
        id="instability-lm-gain-last-bin",
        where="section 5.1, figure 3",
        says="gains before the MLP, or of queries and keys, are in the last bin for nearly 75 %",
        there=SMALL,
        arms="E4M3, gains and operations in bf16",
        judge=Probed(GAINS, "last_bin", fullest_last_bin, {PLAN: "mxfp8", GAIN: "bf16", OPERATIONS: "bf16"}),
        cost=OF_GAINS,
        rule=between(0.5, 1.0, "ours: two thirds of the printed 75 %"),
        page="olmo_gains",
    ),
    claim(
        id="instability-lm-bf16",
        where="section 3.2, figure 1a",
        says="bf16 models are stable in all sizes",
        arms="bf16",
        judge=at_scale(*ALL_SIZES, Dies(GRID, BF16, over=SIZES)),
        rule=between(-inf, *OF_SIZES),
    ),
    *(
        claim(
            id=f"instability-lm-{name}",
            where=where,
            says=f"with {words} models diverge more often than with bf16",
            arms=f"{words}, bf16",
            judge=at_scale(*ALL_SIZES_TWICE, Dies(tables, arm, BF16, SIZES)),
            rule=higher(*OF_SIZES),
        )
        for name, (words, where, arm, tables) in UNSTABLE.items()
    ),
    claim(
        id="instability-lm-larger",
        where="section 3.2, figure 1b",
        says="it is the larger models, trained for longer, that diverge in E5M2",
        arms="E5M2 at 4.8e19 FLOPs, bf16",
        judge=at_scale(*LARGEST),
        rule=higher(*OF_SIZES),
    ),
    claim(
        id="instability-lm-starcoder",
        where="appendix J, figure 18",
        says="on code, too, models diverge in E4M3: it is not the data set",
        arms="E4M3 on StarCoder, bf16",
        judge=at_scale(*ALL_SIZES_TWICE, Dies(STARCODER, ON_CODE | {PLAN: "mxfp8"}, ON_CODE | BF16, SIZES)),
        rule=higher(*OF_SIZES),
    ),
    claim(
        id="instability-lm-affine",
        where="appendix F, figure 12",
        says="without the norms' gains models diverge less often, at 2e-4",
        there="73M, 13B tokens",
        arms="E4M3: norms without gains, with gains",
        judge=at_scale(
            *FIGURE_12,
            Dies(AFFINE, {**AT_2E_4, HAS_GAIN: False}, {**AT_2E_4, HAS_GAIN: True}),
        ),
        rule=lower(*OF_SIZES),
    ),
    claim(
        id="instability-lm-affine-rate",
        where="appendix F, figure 12",
        says="without gains they are unstable again at 1e-3",
        there="73M, 13B tokens",
        arms="E4M3, norms without gains: 1e-3, 2e-4",
        judge=at_scale(
            *FIGURE_12,
            Dies(
                AFFINE,
                {PLAN: "mxfp8", HAS_GAIN: False, RATE: 1e-3},
                {**AT_2E_4, HAS_GAIN: False},
            ),
        ),
        rule=higher(*OF_SIZES),
    ),
    *(
        claim(
            id=f"instability-lm-{name}-stable",
            where="section 6, figures 13, 14, 16, 17",
            says=f"with {words} training is stable in all sizes",
            arms=words,
            judge=at_scale(*ALL_SIZES, Dies(MITIGATIONS, arm, over=SIZES)),
            rule=between(-inf, *OF_SIZES),
        )
        for name, (words, arm) in STABLE.items()
    ),
    *(
        claim(
            id=f"instability-lm-{name}-loss",
            where="section 6, tables 1, 4, 5",
            says=f"with {words} models end as with bf16",
            arms=f"{words}, bf16",
            judge=Difference((RECIPE.sweep,), arm, BF16),
            rule=equal(*RESOLUTION),
            needs=stated.PLANNED_PAIRS,
            comparisons=2,
            page=RECIPE.sweep,
        )
        for name, (words, arm) in STABLE.items()
        if name in ("e4m3-bf16", "e4m3-forward")
    ),
    *(
        claim(
            id=f"instability-lm-{name}-loss",
            where="section 6, tables 1, 4, 5",
            says=f"with {words} models end a little higher than with bf16",
            arms=f"{words}, bf16",
            judge=at_scale(*ALL_SIZES_TWICE, Difference(MITIGATIONS, arm, BF16, over=SIZES)),
            rule=higher(*RESOLUTION),
        )
        for name, (words, arm) in STABLE.items()
        if name in ("e5m2-bf16", "e5m2-forward")
    ),
    claim(
        id="instability-lm-scaling",
        where="appendix G, table 2, figures 13 to 15",
        says="the optimal size grows with compute as in bf16: the exponents a are alike",
        arms="E4M3 weights with bf16 activations, bf16; all sizes",
        judge=at_scale(*ALL_SIZES_TWICE),
        rule=equal(0.02, "half of the range of its table's exponents"),
    ),
)
