"""State, before the runs, where published FP4 recipes contradict each other: arms, margins and what decides.

There are ten sweeps, one for each contradiction, with five pairs of seeds per arm: a 23M Llama on 39 million tokens
(in `fp4_rounding` on 157 million too).
The compared number is the loss on the validation split at the end, in nats, paired by seeds. Arms that no code here
computes are left out: EDEN in `fp4_range`, OsciReset in `fp4_scales`. The arms are the jobs of the sweeps, described by
the columns of the runs' configs.
"""

from __future__ import annotations

from functools import partial

from analysis.ledger.rules import equal, higher, lower
from analysis.stated import Comparison, Question
from analysis.units import PLAN, SCALE_RULE, SKIP_BLOCKS, STEPS, Arm

TRANSFORM = "wgrad_transform"
BF16: Arm = {PLAN: "bf16"}
MX, NV = "mxfp4_parts", "nvfp4_parts"
SCALES = {"MX": MX, "NV": NV}
GEMMS = {"F": ("forward_x", "forward_w"), "D": ("dgrad_dh", "dgrad_w"), "W": ("wgrad_dh", "wgrad_x")}
MARGIN = (0.005, "ours: a tenth of what an FP4 forward costs at 30M parameters in Quartet II's runs")

worse, better, alike = (partial(Comparison, rule=rule(*MARGIN)) for rule in (higher, lower, equal))


def arm(recipe: str, **fields: object) -> Arm:
    """Return the arm of that recipe whose runs have these fields, `operand__field`, in their configs."""
    own = {f"config.precision.recipes.{recipe}.{name.replace('__', '.')}": value for name, value in fields.items()}
    return {PLAN: recipe} | own


def of_gemms(quantised: str, fmt: str = "E2M1") -> dict[str, object]:
    """Return the fields that say which GEMMs are quantised, as in 'FD': forward and dgrad."""
    return {f"{name}__format": fmt if gemm in quantised else None for gemm, names in GEMMS.items() for name in names}


def gradients(rounding: str, headroom: float = 1.0, **more: object) -> dict[str, object]:
    """Return the fields of the output gradient's two casts."""
    fields = {"rounding": rounding, "headroom": headroom} | more
    return {f"{name}__{field}": value for name in ("dgrad_dh", "wgrad_dh") for field, value in fields.items()}


def transform(
    size: int | None, signs: str | None = "none", vector: int | None = None, after: bool | None = False
) -> dict[str, object]:
    """Return the fields of wgrad's Hadamard transform. `vector` is the first of its written signs."""
    fields = {"size": size, "signs": signs, "vector__0": vector, "signs_after": after}
    return {f"{TRANSFORM}__{field}": value for field, value in fields.items()}


NONE, PLUS = transform(None, None, after=None), transform(16)
SIGNS = {
    "none": NONE,
    "all +1": PLUS,
    "one vector": transform(16, vector=1),
    "by step": transform(16, "step"),
    "by call": transform(16, "call"),
    "by call, after": transform(16, "call", after=True),
}
N, S = gradients("even"), gradients("stochastic", 0.75)
CLIPPING = {"floor": ("floor", 1.0), "floor, 3/4": ("floor", 0.75), "ceil": ("ceil", 1.0)}
HORIZONS = {"600 steps": 600, "2400 steps": 2400}
SIXTEEN_OF_17 = 16 / 17

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
            worse("fp4-signs-harm", "arXiv 2605.09825", "random signs are worse than none", "by call", "all +1"),
            better(
                "fp4-signs-help",
                "Quartet II, runs",
                "signs before the transform are better than signs after it",
                "by call",
                "by call, after",
            ),
            better("fp4-signs-hadamard", "arXiv 2605.09825", "a fixed transform is better than none", "all +1", "none"),
            alike("fp4-signs-after", "control", "signs after the transform change nothing", "by call, after", "all +1"),
        ),
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
                better(
                    f"fp4-rounding-needed-{steps}",
                    "arXiv 2509.25149, 2502.20586, 2505.19115",
                    f"stochastic rounding is better, {long}",
                    f"S, none, {long}",
                    f"N, none, {long}",
                )
                for long, steps in HORIZONS.items()
            ),
            worse(
                "fp4-rounding-signs",
                "Quartet II, runs",
                "with random signs rounding to nearest is better",
                "S, by call, 600 steps",
                "N, by call, 600 steps",
            ),
            worse(
                "fp4-rounding-harms",
                "arXiv 2605.09825",
                "with a fixed transform, too, stochastic rounding is worse",
                "S, all +1, 2400 steps",
                "N, all +1, 2400 steps",
            ),
        ),
    ),
    Question(
        "fp4_clipping",
        "Is it clipping that makes stochastic rounding of MXFP4 fail?",
        {"bf16": BF16}
        | {
            f"{letter}, {name}": {**arm(MX, **gradients(rounding, headroom)), SCALE_RULE: rule}
            for name, (rule, headroom) in CLIPPING.items()
            for letter, rounding in (("N", "even"), ("S", "stochastic"))
        },
        (
            better(
                "fp4-clipping-headroom",
                "arXiv 2502.20586",
                "with 3/4 of the range stochastic rounding is better",
                "S, floor, 3/4",
                "S, floor",
            ),
            better(
                "fp4-clipping-ceil",
                "this project's arithmetic",
                "with scales that clip nothing stochastic rounding is better",
                "S, ceil",
                "S, floor",
            ),
        ),
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
            worse(
                "fp4-forward-hadamard-nv",
                "arXiv 2509.25149; Quartet II, runs",
                "a Hadamard transform in the forward harms NVFP4",
                "NV E2M1, H16",
                "NV E2M1",
            ),
            better(
                "fp4-forward-hadamard-mx",
                "arXiv 2605.09825",
                "a Hadamard transform in the forward helps MXFP4",
                "MX E2M1, H16",
                "MX E2M1",
            ),
            better(
                "fp4-forward-hadamard-uniform",
                "arXiv 2606.20381",
                "it helps a format with equal steps (E1M2)",
                "NV E1M2, H16",
                "NV E1M2",
            ),
        ),
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
            worse(
                "fp4-range-clipping",
                "arXiv 2601.22813",
                "gradients that clip at the end of the range are worse",
                "whole range, 24 bits",
                "16/17, 24 bits",
            ),
            alike(
                "fp4-range-bits",
                "Transformer Engine",
                "8 random bits per number are as good as 24",
                "16/17, 8 bits",
                "16/17, 24 bits",
            ),
        ),
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
            worse("fp4-tail-needed", "arXiv 2509.25149", "without a block in bf16 the loss is higher", "none", "last"),
            alike("fp4-tail-spared", "arXiv 2605.09825, 2505.14669", "no block need stay in bf16", "none", "last"),
            alike(
                "fp4-tail-first",
                "arXiv 2509.25149",
                "the first block matters less than the last",
                "first and last",
                "last",
            ),
        ),
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
        tuple(
            better(
                f"fp4-four-over-six-{name}",
                "arXiv 2512.02010",
                f"the choice of two scales lowers the loss, weights {blocks}",
                f"{blocks}, four over six",
                blocks,
            )
            for name, blocks in (("rows", "1 x 16"), ("squares", "16 x 16"))
        ),
    ),
)
