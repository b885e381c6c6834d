"""List the instability paper's claims about students in training: interventions, gradients, rates and ablations."""

from __future__ import annotations

from functools import partial
from math import inf

from analysis.ledger.claim import Claim
from analysis.ledger.instability import (
    CODE,
    CONSTANT,
    COSINE,
    FORMATS,
    FP32,
    HALF,
    LOW_RATES,
    MX_CODE,
    OF_FIGURE_6,
    RATE,
    SIZES,
    WIDTH,
    students,
)
from analysis.ledger.rules import Rule, between, equal, higher, lower
from analysis.ledger.students import (
    PLAN,
    Diverges,
    Ends,
    Intervention,
    Measured,
    last,
    middle,
    place_of_least,
    product_of,
)
from analysis.units import Arm

EARLY, LATE = "0.88", "before 10"
CHANGE = "config.intervention."
FORK_PLAN = f"{CHANGE}plan.layers.*"
REDRAWN = {f"{CHANGE}perturbed_weight": 0}  # the control: the same arithmetic, with one bit of one weight flipped
FP32_THROUGHOUT = {
    FORK_PLAN: "fp32",
    f"{CHANGE}gain": "fp32",
    f"{CHANGE}vector_ops": "fp32",
    f"{CHANGE}compute": "fp32",
}
RCEIL = {f"{CHANGE}scale_rule": "rceil"}
NORMS = {f"{CHANGE}gain": "fp32", f"{CHANGE}norm_ops": "fp32"}
FORWARD_ONLY = {FORK_PLAN: "mxfp8_forward_only"}
BF16_ACT = {FORK_PLAN: "mxfp8_bf16_act"}
BF16_ACT_FORWARD = {FORK_PLAN: "mxfp8_bf16_act_fwd"}
BF16_WEIGHT = {FORK_PLAN: "mxfp8_bf16_weight"}
AGREES = equal(*OF_FIGURE_6)


def intervention(name: str, says: str, words: str, point: str, change: dict, against: dict | None, rule: Rule) -> Claim:
    return students(
        id=f"instability-fork-{name}",
        where="section 5.2, figure 4",
        says=says,
        arms=f"forks at {point}: {words}",
        judge=Intervention(point, change, against),
        rule=rule,
        page="student_teacher",
        there="one parent a point",
        here="forks of students of 4 x 512",
    )


INTERVENTIONS = (
    intervention(
        "fp32-early",
        "FP32 from well before on prevents a divergence",
        "FP32, MXFP8 redrawn",
        EARLY,
        FP32_THROUGHOUT,
        REDRAWN,
        lower(*OF_FIGURE_6),
    ),
    intervention(
        "fp32-late",
        "FP32 from just before on does not prevent it",
        "FP32, MXFP8 redrawn",
        LATE,
        FP32_THROUGHOUT,
        REDRAWN,
        AGREES,
    ),
    intervention(
        "bump-early",
        "exponents that avoid the last bin do not prevent it",
        "RCEIL, MXFP8 redrawn",
        EARLY,
        RCEIL,
        REDRAWN,
        AGREES,
    ),
    intervention(
        "bump-late",
        "nor do they from just before on",
        "RCEIL, MXFP8 redrawn",
        LATE,
        RCEIL,
        REDRAWN,
        AGREES,
    ),
    intervention(
        "norms-early",
        "norms and gains that are not quantised delay or prevent it",
        "norms and gains in FP32, MXFP8 redrawn",
        EARLY,
        NORMS,
        REDRAWN,
        lower(*OF_FIGURE_6),
    ),
    intervention(
        "norms-late",
        "so do they from just before on",
        "norms and gains in FP32, MXFP8 redrawn",
        LATE,
        NORMS,
        REDRAWN,
        lower(*OF_FIGURE_6),
    ),
    intervention(
        "forward-early",
        "a backward that is not quantised does as well as FP32",
        "forward only, FP32",
        EARLY,
        FORWARD_ONLY,
        FP32_THROUGHOUT,
        AGREES,
    ),
    intervention(
        "forward-prevents",
        "a backward that is not quantised prevents it",
        "forward only, MXFP8 redrawn",
        EARLY,
        FORWARD_ONLY,
        REDRAWN,
        lower(*OF_FIGURE_6),
    ),
    intervention(
        "activations-early",
        "bf16 activations in both passes delay or prevent it",
        "bf16 activations, MXFP8 redrawn",
        EARLY,
        BF16_ACT,
        REDRAWN,
        lower(*OF_FIGURE_6),
    ),
    intervention(
        "activations-less-fp32",
        "bf16 activations do less than FP32 in the end",
        "bf16 activations, FP32",
        EARLY,
        BF16_ACT,
        FP32_THROUGHOUT,
        higher(*OF_FIGURE_6),
    ),
    intervention(
        "activations-late",
        "from just before on bf16 activations help most: more than a backward that is not quantised",
        "bf16 activations, forward only",
        LATE,
        BF16_ACT,
        FORWARD_ONLY,
        lower(*OF_FIGURE_6),
    ),
    intervention(
        "activations-forward",
        "bf16 activations in both passes help more than in the forward alone",
        "bf16 activations, in the forward alone",
        LATE,
        BF16_ACT,
        BF16_ACT_FORWARD,
        lower(*OF_FIGURE_6),
    ),
    intervention(
        "weights",
        "bf16 weights help less than bf16 activations",
        "bf16 weights, bf16 activations",
        EARLY,
        BF16_WEIGHT,
        BF16_ACT,
        higher(*OF_FIGURE_6),
    ),
)

GRADIENTS = "gradient_bias"
COUPLED = "coupled_gradient_bias"
EOS = (1.5, 2.5, "ours: a quarter of 2")


def measured(name: str, where: str, says: str, words: str, judge: Measured, rule: Rule) -> Claim:
    return students(
        id=f"instability-{name}", where=where, says=says, arms=words, judge=judge, rule=rule, page="student_teacher"
    )


NOISE = (
    measured(
        "zeta-turns",
        "appendix B.1, figure 5",
        "before a divergence the ratio first falls, then rises: it is least neither first nor last",
        "public code in MXFP8",
        Measured(GRADIENTS, COUPLED, place_of_least("model/ratio"), MX_CODE),
        between(0.02, 0.9, "ours: 0 is the first measurement, 1 the last"),
    ),
    measured(
        "zeta-at-divergence",
        "appendix B.1, figure 5",
        "the loss diverges when the ratio reaches 2",
        "public code in MXFP8, the last measurement before",
        Measured(GRADIENTS, COUPLED, last("model/ratio"), MX_CODE),
        between(1.5, 2.5, "ours: a quarter of 2"),
    ),
    measured(
        "zeta-of-precision",
        "appendix B.1",
        "the ratio is an error of low precision: it is larger in MXFP8 than in bf16",
        "public code in MXFP8, in bf16",
        Measured(GRADIENTS, COUPLED, middle("model/ratio"), MX_CODE, CODE | {PLAN: "bf16"}),
        higher(0.2, "ours: a tenth of 2"),
    ),
    measured(
        "cosine-to-0",
        "appendix B.1, figure 5",
        "the cosine of both gradients falls to 0 in the end",
        "public code in MXFP8",
        Measured(GRADIENTS, COUPLED, last("model/cosine"), MX_CODE, before=False),
        between(-0.1, 0.1, "ours"),
    ),
    measured(
        "edge-of-stability",
        "appendix B.2",
        "the learning rate times the largest eigenvalue hovers at 2",
        "public code in MXFP8",
        Measured(GRADIENTS, "sharpness", product_of("lr", "hessian/eigenvalue"), MX_CODE),
        between(*EOS),
    ),
    measured(
        "eq-10",
        "Eq. 10",
        "a student that diverges breaks the bound, whose left side is then above 1",
        "public code in MXFP8, the last measurement before",
        Measured(GRADIENTS, "sharpness", last("hessian/stability"), MX_CODE),
        between(1.0, inf, "the bound"),
    ),
)

GRID = ("learning_rate_grid",)
rates = partial(students, where="appendix C.1, figure 6", page="student_teacher", there="9 sizes")

RATES = (
    *(
        rates(
            id=f"instability-low-rates-{name.replace(' ', '-').lower()}",
            says=f"up to 1e-4 {name} is stable",
            arms=f"{name}, 1e-5 to 1e-4",
            judge=Diverges(GRID, arm | CONSTANT | {RATE: LOW_RATES}, over=(*SIZES, RATE), unstable=True),
            rule=between(-inf, HALF, OF_FIGURE_6[1]),
        )
        for name, arm in FORMATS.items()
    ),
    *(
        rates(
            id=f"instability-5e-4-{name.replace(' ', '-').lower()}",
            says=f"at 5e-4 {name} is unstable more often than FP32",
            arms=f"{name}, FP32",
            judge=Diverges(
                GRID, FORMATS[name] | CONSTANT | {RATE: 5e-4}, FP32 | CONSTANT | {RATE: 5e-4}, SIZES, unstable=True
            ),
            rule=higher(*OF_FIGURE_6),
        )
        for name in ("MX mix", "E2M3")
    ),
    *(
        rates(
            id=f"instability-1e-3-{name.replace(' ', '-').lower()}",
            says=f"at 1e-3 {name} is unstable in some sizes",
            arms=name,
            judge=Diverges(GRID, arm | CONSTANT | {RATE: 1e-3}, over=SIZES, unstable=True),
            rule=between(1 / 9, inf, "one of nine sizes"),
        )
        for name, arm in FORMATS.items()
    ),
    rates(
        id="instability-larger-fail",
        says="at 1e-3 larger students are unstable more often",
        arms="MX mix, width 768, width 256",
        judge=Diverges(
            GRID,
            FORMATS["MX mix"] | CONSTANT | {RATE: 1e-3, WIDTH: 768},
            FORMATS["MX mix"] | CONSTANT | {RATE: 1e-3, WIDTH: 256},
            (SIZES[1],),
            unstable=True,
        ),
        rule=higher(*OF_FIGURE_6),
    ),
    rates(
        id="instability-cosine",
        says="a cosine from 1e-3 to 1e-5 suppresses instabilities",
        arms="MX mix: cosine, constant 1e-3",
        judge=Diverges(
            GRID,
            FORMATS["MX mix"] | COSINE,
            FORMATS["MX mix"] | CONSTANT | {RATE: 1e-3},
            SIZES,
            unstable=True,
        ),
        rule=lower(*OF_FIGURE_6),
    ),
    rates(
        id="instability-cosine-difference",
        says="under the cosine, too, low precision is unstable more often",
        arms="E2M3, FP32, cosine",
        judge=Diverges(GRID, FORMATS["E2M3"] | COSINE, FP32 | COSINE, SIZES, unstable=True),
        rule=higher(*OF_FIGURE_6),
    ),
)

ATTENTION: Arm = {"config.model.attention_heads": (1, 2, 4, 8, 16)}
PLAIN: Arm = {"config.model.attention_heads": 0}
SGD, ADAM = {"config.optimizer.kind": "sgd"}, {"config.optimizer.kind": "adam"}
later = partial(students, there="one run an arm or a size")

LATER = (
    later(
        id="instability-attention-more",
        where="appendix D, figure 7",
        says="self-attention makes low precision no less stable",
        arms="MXFP8: with, without attention",
        judge=Diverges(("attention",), {**MX_CODE, **ATTENTION}, {**MX_CODE, **PLAIN}),
        rule=between(-inf, HALF, OF_FIGURE_6[1]),
    ),
    later(
        id="instability-attention-less",
        where="appendix D, figure 7",
        says="self-attention makes low precision more stable",
        arms="MXFP8: with, without attention",
        judge=Diverges(("attention",), {**MX_CODE, **ATTENTION}, {**MX_CODE, **PLAIN}),
        rule=lower(*OF_FIGURE_6),
    ),
    later(
        id="instability-depth-width",
        where="appendix E, figure 9",
        says="over depths and widths at 5e-4 MX mix is unstable more often than FP32",
        arms="MX mix, FP32",
        judge=Diverges(("depth_width",), FORMATS["MX mix"], FP32, SIZES),
        rule=higher(*OF_FIGURE_6),
    ),
    later(
        id="instability-depth-width-e2m3",
        where="appendix E, figure 9",
        says="over depths and widths at 5e-4 E2M3 is unstable more often than FP32",
        arms="E2M3, FP32",
        judge=Diverges(("depth_width",), FORMATS["E2M3"], FP32, SIZES),
        rule=higher(*OF_FIGURE_6),
    ),
    later(
        id="instability-sgd",
        where="appendix E, figure 10",
        says="SGD is more stable than Adam in low precision",
        arms="MXFP8: SGD, Adam",
        judge=Diverges(("optimizers",), MX_CODE | SGD | {"config.optimizer.momentum": 0.0}, MX_CODE | ADAM),
        rule=lower(*OF_FIGURE_6),
    ),
    later(
        id="instability-sgd-momentum",
        where="appendix E, figure 10",
        says="SGD with momentum is more stable than Adam in low precision",
        arms="MXFP8: SGD with momentum, Adam",
        judge=Diverges(("optimizers",), MX_CODE | SGD | {"config.optimizer.momentum": 0.9}, MX_CODE | ADAM),
        rule=lower(*OF_FIGURE_6),
    ),
    students(
        id="instability-final-loss",
        where="section 1",
        says="low precision degrades the loss: where both live, MXFP8 ends higher than FP32",
        arms="public code: MXFP8, FP32",
        judge=Ends(("overflow",), MX_CODE, FP32),
        rule=higher(0.05, "ours: 5 % of the final loss"),
        page="student_figures",
        there="one run an arm",
    ),
)

CLAIMS = (*INTERVENTIONS, *NOISE, *RATES, *LATER)
