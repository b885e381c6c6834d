"""State, before the runs, where published FP4 recipes contradict each other: arms, margins and what decides.

There is a sweep for each of ten contradictions, with five pairs of seeds per arm: a 23M Llama on 39 million tokens (in
`fp4_rounding` on 157 million too). The compared number is the loss on the validation split at the
end, in nats, paired by seeds, or how many runs diverge. Arms that no code here computes are left out: EDEN in
`fp4_range`, OsciReset in `fp4_scales`. The arms are the jobs of the sweeps, described by the columns of the runs'
configs.

`fp4_where`, `fp4_weight_blocks` and `fp4_scales` were run first. What they cost set the other margins, before any run
of another sweep was counted.
"""

from __future__ import annotations

from functools import partial

from analysis.fp4.arms import (
    BF16,
    CLIPPING,
    HORIZONS,
    MX,
    NV,
    SCALES,
    SIGNS,
    SIXTEEN_OF_17,
    N,
    S,
    arm,
    gradients,
    of_gemms,
)
from analysis.ledger.rules import equal, higher, lower
from analysis.stated import Comparison, Question
from analysis.units import PLAN, SCALE_RULE, SKIP_BLOCKS, STEPS

MARGIN = (0.005, "ours: a tenth of what an FP4 forward costs at 30M parameters in Quartet II's runs")
MX_GRADIENTS = (0.002, "ours: a ninth of what MXFP4 gradients cost in fp4_where")
MX_FORWARD = (0.003, "ours: about half of the published share of what an MXFP4 forward costs in fp4_where")
NV_PART = (0.001, "ours: at most half of the published share of what the part costs in fp4_where")
ONE_RUN_OF_TEN = (0.1, "ours: one run of ten")

worse, better, alike = (partial(Comparison, rule=rule(*MARGIN)) for rule in (higher, lower, equal))
worse_mx, better_mx, _ = (partial(Comparison, rule=rule(*MX_GRADIENTS)) for rule in (higher, lower, equal))
worse_nv, better_nv, alike_nv = (partial(Comparison, rule=rule(*NV_PART)) for rule in (higher, lower, equal))
dies = partial(Comparison, rule=higher(*ONE_RUN_OF_TEN), divergences=True)

CONTRADICTIONS = (
    Question(
        "fp4_where",
        "Which of the three GEMMs costs most in FP4?",
        {"bf16": BF16}
        | {
            f"{scales} {gemms}": arm(recipe, **of_gemms(gemms))
            for scales, recipe in SCALES.items()
            for gemms in ("F", "D", "W", "FD", "FDW")
        },
        tuple(
            compared(f"fp4-where-{name}-{scales.lower()}", by, says, f"{scales} {one}", f"{scales} {other}")
            for scales in SCALES
            for compared, name, by, says, one, other in (
                (worse, "forward", "Quartet II, runs", "an FP4 forward costs more than an FP4 wgrad", "F", "W"),
                (worse, "wgrad", "arXiv 2605.09825", "an FP4 wgrad costs more than an FP4 forward", "W", "F"),
                (better, "dgrad", "arXiv 2605.09825", "an FP4 dgrad costs less than an FP4 forward", "D", "F"),
            )
        ),
    ),
    Question(
        "fp4_signs",
        "Do random signs of wgrad's Hadamard transform harm?",
        {"bf16": BF16} | {name: arm(MX, **fields) for name, fields in SIGNS.items()},
        (
            worse_mx("fp4-signs-harm", "arXiv 2605.09825", "random signs are worse than all +1", "by call", "all +1"),
            dies("fp4-signs-die", "arXiv 2605.09825", "random signs make more runs diverge", "by call", "all +1"),
            better_mx(
                "fp4-signs-help",
                "Quartet II, runs",
                "signs before the transform are better than signs after it",
                "by call",
                "by call, after",
            ),
            better_mx(
                "fp4-signs-hadamard", "arXiv 2605.09825", "a fixed transform is better than none", "all +1", "none"
            ),
            alike("fp4-signs-after", "control", "signs after the transform change nothing", "by call, after", "all +1"),
        ),
        margin=MX_GRADIENTS[0],
    ),
    Question(
        "fp4_rounding",
        "Must gradients be rounded stochastically?",
        {f"bf16, {long}": {**BF16, STEPS: steps} for long, steps in HORIZONS.items()}
        | {
            f"{rounding}, {signs}, {long}": {**arm(MX, **SIGNS[signs], **fields), STEPS: steps}
            for signs in ("none", "all +1", "by call")
            for rounding, fields in (("N", N), ("S", S))
            for long, steps in HORIZONS.items()
        },
        (
            *(
                better_mx(
                    f"fp4-rounding-needed-{steps}",
                    "arXiv 2509.25149, 2502.20586, 2505.19115",
                    f"stochastic rounding is better, {long}",
                    f"S, none, {long}",
                    f"N, none, {long}",
                )
                for long, steps in HORIZONS.items()
            ),
            worse_mx(
                "fp4-rounding-signs",
                "Quartet II, runs",
                "with random signs rounding to nearest is better",
                "S, by call, 600 steps",
                "N, by call, 600 steps",
            ),
            worse_mx(
                "fp4-rounding-harms",
                "arXiv 2605.09825",
                "with a fixed transform, too, stochastic rounding is worse",
                "S, all +1, 2400 steps",
                "N, all +1, 2400 steps",
            ),
            worse_mx(
                "fp4-rounding-crosses",
                "Quartet II, runs",
                "with a fixed transform rounding to nearest loses its lead as tokens grow",
                "S, all +1, 600 steps",
                "N, all +1, 600 steps",
                beside=("S, all +1, 2400 steps", "N, all +1, 2400 steps"),
            ),
            dies(
                "fp4-rounding-dies",
                "arXiv 2605.09825",
                "stochastic rounding makes more runs diverge",
                "S, all +1, 2400 steps",
                "N, all +1, 2400 steps",
            ),
        ),
        margin=MX_GRADIENTS[0],
    ),
    Question(
        "fp4_clipping",
        "Is it clipping that makes stochastic rounding of MXFP4 fail?",
        {"bf16": BF16}
        | {
            f"{letter}, {name}": {**arm(MX, **gradients(rounding, headroom, scale_rule=rule)), SCALE_RULE: "floor"}
            for name, (rule, headroom) in CLIPPING.items()
            for letter, rounding in (("N", "even"), ("S", "stochastic"))
        },
        (
            better_mx(
                "fp4-clipping-headroom",
                "arXiv 2502.20586",
                "with 3/4 of the range stochastic rounding is better",
                "S, floor, 3/4",
                "S, floor",
            ),
            better_mx(
                "fp4-clipping-ceil",
                "this project's arithmetic",
                "with scales that clip nothing stochastic rounding is better",
                "S, ceil",
                "S, floor",
            ),
            *(
                worse_mx(
                    f"fp4-clipping-explains-{name}",
                    "arXiv 2502.20586",
                    f"without clipping ({said}) stochastic rounding costs less, over rounding to nearest",
                    "S, floor",
                    "N, floor",
                    beside=(f"S, {said}", f"N, {said}"),
                )
                for name, said in (("headroom", "floor, 3/4"), ("ceil", "ceil"))
            ),
            dies(
                "fp4-clipping-dies",
                "arXiv 2605.09825",
                "with scales rounded down stochastic rounding makes more runs diverge",
                "S, floor",
                "N, floor",
            ),
        ),
        margin=MX_GRADIENTS[0],
    ),
    Question(
        "fp4_forward_hadamard",
        "Does a Hadamard transform of the forward harm?",
        {"bf16": BF16}
        | {
            f"{scales} {fmt}{'' if size is None else ', H16'}": arm(
                recipe, **of_gemms("F", fmt), forward_transform__size=size
            )
            for scales, recipe in SCALES.items()
            for fmt in ("E2M1", "E1M2")
            for size in (None, 16)
        },
        (
            worse_nv(
                "fp4-forward-hadamard-nv",
                "arXiv 2509.25149; Quartet II, runs",
                "a Hadamard transform in the forward harms NVFP4",
                "NV E2M1, H16",
                "NV E2M1",
            ),
            Comparison(
                "fp4-forward-hadamard-mx",
                "arXiv 2605.09825",
                "a Hadamard transform in the forward helps MXFP4",
                "MX E2M1, H16",
                "MX E2M1",
                lower(*MX_FORWARD),
            ),
            better_nv(
                "fp4-forward-hadamard-uniform",
                "arXiv 2606.20381",
                "it helps a format with equal steps (E1M2)",
                "NV E1M2, H16",
                "NV E1M2",
            ),
        ),
        margin=NV_PART[0],
    ),
    Question(
        "fp4_weight_blocks",
        "Do square blocks of weights gain more than they cost?",
        {
            "bf16": BF16,
            "16 x 16": arm(NV, forward_w__two_dimensional=True, dgrad_w__two_dimensional=True),
            "1 x 16, twice": arm(
                NV, forward_w__two_dimensional=False, dgrad_w__two_dimensional=False, dgrad_w__source="high_precision"
            ),
            "1 x 16, again": arm(NV, dgrad_w__source="forward", dgrad_w__rounding="stochastic"),
        },
        (
            better(
                "fp4-weight-blocks-consistent",
                "arXiv 2509.25149",
                "one weight in forward and dgrad is better",
                "16 x 16",
                "1 x 16, twice",
            ),
            worse(
                "fp4-weight-blocks-cost",
                "Quartet II, runs",
                "square blocks cost more than they gain",
                "16 x 16",
                "1 x 16, twice",
            ),
            worse(
                "fp4-weight-blocks-again",
                "Quartet II, runs",
                "a weight that is quantised again for dgrad is worse",
                "1 x 16, again",
                "1 x 16, twice",
            ),
        ),
    ),
    Question(
        "fp4_range",
        "Is the bias of NVFP4's stochastic rounding harmless?",
        {"bf16": BF16}
        | {
            f"{name}, {bits} bits": arm(NV, **gradients("stochastic", headroom, random_bits=bits))
            for name, headroom in (("whole range", 1.0), ("16/17", SIXTEEN_OF_17))
            for bits in (24, 8)
        },
        (
            worse_nv(
                "fp4-range-clipping",
                "arXiv 2601.22813",
                "gradients that clip at the end of the range are worse",
                "whole range, 24 bits",
                "16/17, 24 bits",
            ),
            alike_nv(
                "fp4-range-bits",
                "Transformer Engine",
                "8 random bits per number are as good as 24",
                "16/17, 8 bits",
                "16/17, 24 bits",
            ),
        ),
        margin=NV_PART[0],
    ),
    Question(
        "fp4_tail",
        "Must the last blocks stay in bf16?",
        {
            "bf16": BF16,
            "none": {PLAN: "nvfp4", SKIP_BLOCKS: 0},
            "last": {PLAN: "nvfp4", f"{SKIP_BLOCKS}.0": 0, f"{SKIP_BLOCKS}.1": 1},
            "first and last": {PLAN: "nvfp4", SKIP_BLOCKS: 1},
        },
        (
            worse_nv(
                "fp4-tail-needed", "arXiv 2509.25149", "without a block in bf16 the loss is higher", "none", "last"
            ),
            alike_nv("fp4-tail-spared", "arXiv 2605.09825, 2505.14669", "no block need stay in bf16", "none", "last"),
            worse_nv(
                "fp4-tail-first",
                "arXiv 2509.25149",
                "the first block matters less than the last",
                "none",
                "last",
                beside=("last", "first and last"),
            ),
            dies("fp4-tail-dies", "arXiv 2509.25149", "without a block in bf16 more runs diverge", "none", "last"),
        ),
        margin=NV_PART[0],
    ),
    Question(
        "fp4_scales",
        "Is it the scales or the size of the blocks?",
        {"bf16": BF16}
        | {
            f"{name} scales, blocks of {size}": {**arm(recipe), "config.precision.block_size": size}
            for name, recipe in (("E8M0", MX), ("E4M3", NV))
            for size in (16, 32)
        },
        (
            better(
                "fp4-scales-nv",
                "arXiv 2509.25149",
                "NVFP4 is better than MXFP4",
                "E4M3 scales, blocks of 16",
                "E8M0 scales, blocks of 32",
            ),
            worse(
                "fp4-scales-format",
                "arXiv 2509.17791",
                "with E4M3 scales the loss is higher",
                "E4M3 scales, blocks of 32",
                "E8M0 scales, blocks of 32",
            ),
            better(
                "fp4-scales-size",
                "arXiv 2509.25149",
                "with E8M0 scales, rounded down, smaller blocks are better",
                "E8M0 scales, blocks of 16",
                "E8M0 scales, blocks of 32",
            ),
        ),
    ),
    Question(
        "fp4_four_over_six",
        "What does the choice of two scales gain in the forward?",
        {"bf16": BF16}
        | {
            f"{blocks}{choice}": arm(
                NV, **of_gemms("F"), forward_w__two_dimensional=square, forward_w__largest_scale=largest
            )
            for blocks, square in (("1 x 16", False), ("16 x 16", True))
            for choice, largest in (("", 448.0), (", four over six", 256.0))
        },
        (
            *(
                better_nv(
                    f"fp4-four-over-six-{name}",
                    "arXiv 2512.02010",
                    f"the choice of two scales lowers the loss, weights {blocks}",
                    f"{blocks}, four over six",
                    blocks,
                )
                for name, blocks in (("rows", "1 x 16"), ("squares", "16 x 16"))
            ),
            dies(
                "fp4-four-over-six-dies",
                "arXiv 2512.02010",
                "without the choice more runs diverge, in the forward alone",
                "16 x 16",
                "16 x 16, four over six",
            ),
        ),
        margin=NV_PART[0],
    ),
)
