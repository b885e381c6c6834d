"""List the instability paper's claims about which students diverge.

The rules of three figures were stated before their runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

from analysis.instability.claims import CLAIMS as STATED_CLAIMS
from analysis.instability.claims import OF_FIGURE_6, of_figure
from analysis.ledger import costs
from analysis.ledger.claim import STUDENTS, Claim, Judge
from analysis.ledger.rules import Rule, between, equal, higher, lower
from analysis.ledger.students import Diverges, Ends, Prestated
from analysis.ledger.tables import Tables
from analysis.units import DEPTH, NORM, PLAN, SCALE_RULE, WIDTH

HALF = OF_FIGURE_6[0]
MORE, LESS, ALIKE = (rule(*OF_FIGURE_6) for rule in (higher, lower, equal))
SAME_LOSS = (0.05, "ours: 5 % of the final loss")

STUDENT_LR, LOSS, TEACHER = "config.lr", "config.loss", "config.teacher.kind"
GAIN, OPERATIONS = "config.student.gain", "config.student.vector_ops"
CODE = {OPERATIONS: "code", TEACHER: "code", LOSS: "mse"}
MX_CODE = CODE | {PLAN: "mxfp8"}
FP32 = {PLAN: "fp32"}
TEXT = {PLAN: "mxfp8", OPERATIONS: "bf16", GAIN: "mx", TEACHER: "paper"}
SIZES = (WIDTH, DEPTH)
CONSTANT, COSINE = {"config.schedule.kind": "constant"}, {"config.schedule.kind": "cosine"}
LOW_RATES = (1e-5, 5e-5, 1e-4)
FORMATS = {"MX mix": {PLAN: "mx_mix"}, "E2M3": {PLAN: "mxfp6_e2m3"}, "FP32": FP32}
DECISIVE = ("decisive_4",)  # eight data seeds of one code; those of `decisive` to `decisive_3` are of two
# The factorial arm of `decisive` from which each control differs in one thing.
REFERENCE = {
    PLAN: "mxfp8",
    NORM: "layernorm",
    GAIN: "bf16",
    "config.precision.rounding": "even",
    SCALE_RULE: "floor",
    TEACHER: "code",
}
CONTROL = {NORM: "layernorm", TEACHER: "code"}

students = partial(Claim, kind=STUDENTS, there="4 x 512 and like sizes, one run each", needs=8)


def general(judge: Judge, rule: Rule) -> Callable[[Tables], str]:
    """Return a function from the tables to what the general rules say."""
    return lambda tables: rule.verdict(judge(tables).found)


FIGURES, WINDOW = "student_figures", "learning_rate_window"  # pages
KL = {LOSS: "kl"}
XAVIER, TORCH = ({"config.model.init": init} for init in ("xavier", "torch"))
BOTH = (WIDTH, STUDENT_LR)

# The rules were stated before the runs of a lot. What the general rules say is shown beside them.
STATED = tuple(
    students(
        id=f"instability-{name}",
        where=where,
        says=says,
        arms=words,
        judge=Prestated(claim, lot, by_general),
        rule=claim.rule,
        comparisons=len(of_figure(claim.figure)),
        page=WINDOW if lot == WINDOW else FIGURES,
        there="one run an arm",
    )
    for name, where, says, words, lot, by_general in (
        (
            *("fig-3-diverges", "figure 3, centre", "MXFP8 diverges more often than FP32"),
            *("public code in MXFP8, FP32", "overflow", general(Diverges(("overflow",), MX_CODE, FP32), MORE)),
        ),
        (
            *("fig-3-gains", "section 5.1, figure 3"),
            "before a divergence at least three quarters of the first block's gains are in the last bin",
            *("public code in MXFP8", "overflow", None),
        ),
        (
            *("fig-3-activations", "section 5.1, figure 3 right"),
            "about 1 % of the activations, 0.5 to 2 %, is in the last bin",
            *("public code in MXFP8", "overflow", None),
        ),
        *(
            (
                *(f"window-fp32-{width}", "appendix C.1", f"at width {width} FP32 is stable at 2e-4 to 6e-4"),
                *(f"FP32, width {width}", WINDOW),
                general(
                    Diverges((WINDOW,), FP32 | {WIDTH: width}, over=(STUDENT_LR,), unstable=True),
                    between(-inf, HALF, OF_FIGURE_6[1]),
                ),
            )
            for width in (512, 768)
        ),
        (
            *("window-mix", "appendix C.1, figure 6", "at 2e-4 to 6e-4 MX mix diverges more often than FP32"),
            *("MX mix, FP32", WINDOW, general(Diverges((WINDOW,), FORMATS["MX mix"], FP32, over=BOTH), MORE)),
        ),
        (
            *("window-rates", "appendix C.1, figure 6", "in MX mix instabilities come with larger rates"),
            *("MX mix at 6e-4, at 2e-4", WINDOW, None),
        ),
        (
            *("fig-8-kl", "appendix D, figure 8", "with KL, too, MXFP8 diverges more often than FP32"),
            "public code with KL in MXFP8, FP32",
            *("loss", general(Diverges(("loss",), MX_CODE | KL, FP32 | KL), MORE)),
        ),
        (
            *("fig-8-back", "appendix D, figure 8", "with KL more of what diverges comes back than with MSE"),
            *("public code in MXFP8 with KL, MSE", "loss", None),
        ),
        (
            *("fig-11-small", "appendix E, figure 11", "smaller initial weights diverge less often in MXFP8"),
            *("public code in MXFP8: Xavier at a gain of 0.5, torch's", "initialisation"),
            general(Diverges(("initialisation",), MX_CODE | XAVIER, MX_CODE | TORCH), LESS),
        ),
    )
    for claim in STATED_CLAIMS
    if claim.says == says
)

FIGURE_2, ACTIVATION = ("activations_and_norm",), "config.model.activation"
NO_NORM, LAYERNORM = ({NORM: kind} for kind in ("none", "layernorm"))
SWIGLU, GELU = (LAYERNORM | {ACTIVATION: name} for name in ("swiglu", "gelu"))
ALL = (*SIZES, ACTIVATION)  # settings of figure 2b's arms
# The stacks that results/prestated.md, lot 2, has left of figure 2, of four initial seeds in MXFP8 and two in FP32.
IN_MX, IN_FP32 = costs.students(mx=8 * 4 * 9000), costs.students(fp32=12 * 2 * 9000)

ABLATIONS = (
    students(
        id="instability-text-diverges",
        where="sections 4.1, 5.1",
        says="the student that the text describes, with gains in MX and a teacher like itself, diverges in MXFP8",
        arms="the paper's text in MXFP8",
        judge=Diverges(("overflow",), TEXT),
        rule=between(HALF, inf, OF_FIGURE_6[1]),
        page=FIGURES,
    ),
    *(
        students(
            id=f"instability-{name}",
            where=where,
            says=says,
            arms=f"{words}; code's teacher",
            judge=Diverges(DECISIVE, arm, baseline),
            rule=rule,
            page="student_teacher",
        )
        for name, where, says, words, arm, baseline, rule in (
            (
                *("mxfp8-less-bf16", "section 4.1"),
                "what makes students diverge is MX: MXFP8 diverges more often than bf16",
                *("MXFP8, bf16", REFERENCE, CONTROL | {PLAN: "bf16"}, MORE),
            ),
            (
                *("gains-in-mx", "section 5.1, key takeaways"),
                "overflow of clustered gains is the dominant cause: gains in MX diverge more often than in bf16",
                *("gains in MX, in bf16", REFERENCE | {GAIN: "mx"}, REFERENCE, MORE),
            ),
            (
                *("scale-rule", "sections 5.1, 7"),
                "a scale that avoids the overflow is more stable: RCEIL diverges less often than floor",
                *("RCEIL, floor", REFERENCE | {SCALE_RULE: "rceil"}, REFERENCE, LESS),
            ),
            (
                *("e5m2", "section 5.1", "E5M2, too, is unstable: it diverges more often than bf16"),
                *("E5M2, bf16", CONTROL | {PLAN: "mxfp8_e5m2"}, CONTROL | {PLAN: "bf16"}, MORE),
            ),
            (
                *("weights-only", "sections 5.2, 6"),
                "with bf16 activations (MX weights alone) students diverge less often than in MXFP8",
                *("weights only, MXFP8", CONTROL | {PLAN: "mxfp8_bf16_act"}, REFERENCE, LESS),
            ),
            (
                *("forward-only", "sections 5.2, 6"),
                "with MX in the forward alone students diverge less often than in MXFP8",
                *("forward only, MXFP8", CONTROL | {PLAN: "mxfp8_forward_only"}, REFERENCE, LESS),
            ),
        )
    ),
    *(
        students(
            id=f"instability-fig-2-{name}",
            where=where,
            says=says,
            arms=words,
            judge=judge,
            rule=rule,
            page="student_ablations",
            there="one run a size",
            comparisons=5,  # the claims of figure 2, which were stated to be judged together
            cost=cost,
        )
        for name, where, says, words, judge, rule, cost in (
            (
                *("swiglu", "section 4.2, figure 2a", "in low precision SwiGLU diverges more often than GELU"),
                *(
                    "SwiGLU, GELU in MXFP8",
                    Diverges(FIGURE_2, MX_CODE | SWIGLU, MX_CODE | GELU, SIZES, without_open=True),
                ),
                MORE,
                IN_MX,
            ),
            (
                *("swiglu-fp32", "section 4.2, figure 2a", "SwiGLU diverges more often in high precision as well"),
                *("SwiGLU, GELU in FP32", Diverges(FIGURE_2, FP32 | SWIGLU, FP32 | GELU, SIZES, without_open=True)),
                MORE,
                IN_FP32,
            ),
            (
                *("no-norm", "section 4.2, figure 2b", "without LayerNorm low precision diverges less often"),
                *(
                    "no norm, LayerNorm in MXFP8",
                    Diverges(FIGURE_2, MX_CODE | NO_NORM, MX_CODE | LAYERNORM, ALL, without_open=True),
                ),
                LESS,
                IN_MX,
            ),
            (
                *("no-norm-fp32", "section 4.2, figure 2b", "without LayerNorm high precision diverges more often"),
                *(
                    "no norm, LayerNorm in FP32",
                    Diverges(FIGURE_2, FP32 | NO_NORM, FP32 | LAYERNORM, ALL, without_open=True),
                ),
                MORE,
                IN_FP32,
            ),
            (
                *("no-norm-loss", "section 4.2, figure 2b", "without LayerNorm the loss is lower"),
                *("no norm, LayerNorm in FP32", Ends(FIGURE_2, FP32 | NO_NORM, FP32 | LAYERNORM, ALL)),
                lower(*SAME_LOSS),
                IN_FP32,
            ),
        )
    ),
)

CLAIMS = (*STATED, *ABLATIONS)
