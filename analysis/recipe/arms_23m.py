"""State, before the runs, what a 23M Llama can show about the MXFP8 recipe: arms, margins and what decides.

The sweep is `recipe_23m`. `recipe_23m_again` repeats most of it with seeds that the first has not seen. The compared
number is the loss on the validation split at the end, in nats, paired by seeds. The claims of one figure hold together:
their intervals are corrected by their number.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from analysis.ledger.recipe import PERPLEXITY
from analysis.ledger.rules import equal, higher
from analysis.stated import Comparison, Question
from analysis.units import PLAN, SCALE_RULE, SKIP_BLOCKS, Arm

OPERANDS = {
    "E4M3": "mxfp8",
    "E5M2 gradients": "mxfp8_e5m2_grad",
    "E5M2 weights": "mxfp8_e5m2_weight",
    "E5M2 activations": "mxfp8_e5m2_act",
}
FLOOR = ", floor"
RULES = {"": "rceil", FLOOR: "floor"}
TENSOR, BLOCKWISE = "FP8, first and last block in bf16", "FP8 in blocks of 128"
ARMS: dict[str, Arm] = {
    "bf16": {PLAN: "bf16"},
    **{
        f"{name}{said}": {PLAN: plan, SCALE_RULE: rule}
        for name, plan in OPERANDS.items()
        for said, rule in RULES.items()
    },
    "forward only": {PLAN: "mxfp8_forward_only"},
    "bf16 activations": {PLAN: "mxfp8_bf16_act"},
    TENSOR: {PLAN: "fp8_tensor", SKIP_BLOCKS: 1},
    BLOCKWISE: {PLAN: "fp8_blockwise"},
}
worse, alike = (partial(Comparison, rule=rule(*PERPLEXITY)) for rule in (higher, equal))

FIGURE_2 = (
    *(
        worse(
            f"recipe-23m-ocp-worse-{name}",
            "section 3.1, figure 2",
            f"with scales rounded down {words} ends higher than with scales rounded up",
            f"{arm}{FLOOR}",
            arm,
        )
        for name, words, arm in (
            ("e4m3", "E4M3 throughout", "E4M3"),
            ("e5m2-grad", "E4M3 with E5M2 gradients", "E5M2 gradients"),
        )
    ),
    alike(
        "recipe-mxfp8-is-bf16-small",
        "section 3, figure 2",
        "MXFP8 ends within 0.50 % of bf16's perplexity",
        "E4M3",
        "bf16",
    ),
    alike(
        "recipe-23m-round-up-e5m2-grad",
        "section 3.1, figure 2",
        "with scales rounded up MXFP8 with E5M2 gradients ends as bf16 does",
        "E5M2 gradients",
        "bf16",
    ),
)
FIGURE_3 = (
    *(
        worse(
            f"recipe-23m-e5m2-{name}{said}",
            "section 3.2, figure 3a",
            f"E5M2 {name} end higher than {words}",
            f"E5M2 {name}",
            baseline,
        )
        for name in ("weights", "activations")
        for said, words, baseline in (("", "E4M3's", "E4M3"), ("-than-gradients", "E5M2 gradients", "E5M2 gradients"))
    ),
    alike(
        "recipe-23m-e5m2-gradients",
        "section 3.2, figure 3a",
        "in a small model E5M2 gradients end as E4M3's do",
        "E5M2 gradients",
        "E4M3",
    ),
)
SECTION_3_3 = (
    alike(
        "recipe-23m-fp8-loss",
        "section 3.3",
        "MXFP8 without any block in bf16 ends as FP8 with two",
        "E4M3",
        TENSOR,
    ),
    alike(
        "recipe-23m-fp8-blockwise",
        "section 3.3",
        "MXFP8 ends as FP8 with scales of 1 x 128 and 128 x 128",
        "E4M3",
        BLOCKWISE,
        table="recipe_23m_blockwise",
    ),
)
TOGETHER = (FIGURE_2, FIGURE_3, SECTION_3_3)
RECIPE = Question("recipe_23m", "What of the MXFP8 recipe shows at 23M?", ARMS, sum(TOGETHER, ()))

TOGETHER_AGAIN = tuple(
    tuple(
        replace(
            one,
            id=f"{one.id}-again",
            says=f"in twelve other seeds {one.says}",
            table=one.table and f"{one.table}_again",
        )
        for one in claims
    )
    for claims in TOGETHER
)
LEFT_OUT = ("forward only", "bf16 activations", f"E5M2 weights{FLOOR}", f"E5M2 activations{FLOOR}")
RECIPE_AGAIN = Question(
    "recipe_23m_again",
    "What of the MXFP8 recipe shows at 23M, in other seeds?",
    {name: arm for name, arm in ARMS.items() if name not in LEFT_OUT},
    sum(TOGETHER_AGAIN, ()),
    seeds=range(5, 17),
)
