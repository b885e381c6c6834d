"""List the instability paper's claims about students in training: interventions, gradients, rates and ablations."""

from __future__ import annotations

from functools import partial
from math import inf

from analysis.ledger import costs
from analysis.ledger.claim import Claim
from analysis.ledger.instability import (
    ALIKE,
    CODE,
    CONSTANT,
    COSINE,
    FORMATS,
    FP32,
    HALF,
    LESS,
    LOW_RATES,
    MORE,
    MX_CODE,
    OF_FIGURE_6,
    SIZES,
    STUDENT_LR,
    students,
)
from analysis.ledger.rules import Rule, between, higher
from analysis.ledger.students import (
    Diverges,
    Ends,
    Intervention,
    Measured,
    last,
    middle,
    place_of_least,
    product_of,
)
from analysis.ledger.tables import Tables
from analysis.units import PLAN, WIDTH, Arm

EARLY, LATE = "0.88", "before 10"
CHANGE = "config.intervention."
FORK_PLAN = f"{CHANGE}plan.layers.*"
# A redrawn fork is the control: the same arithmetic, with one bit of one weight flipped.
REDRAWN, FORWARD_ONLY, ACTIVATIONS = "MXFP8 redrawn", "forward only", "bf16 activations"
CHANGES: dict[str, Arm] = {
    REDRAWN: {f"{CHANGE}perturbed_weight": 0},
    "FP32": {FORK_PLAN: "fp32"} | {f"{CHANGE}{part}": "fp32" for part in ("gain", "vector_ops", "compute")},
    "RCEIL": {f"{CHANGE}scale_rule": "rceil"},
    "norms and gains in FP32": {f"{CHANGE}gain": "fp32", f"{CHANGE}norm_ops": "fp32"},
    FORWARD_ONLY: {FORK_PLAN: "mxfp8_forward_only"},
    ACTIVATIONS: {FORK_PLAN: "mxfp8_bf16_act"},
    "in the forward alone": {FORK_PLAN: "mxfp8_bf16_act_fwd"},
    "bf16 weights": {FORK_PLAN: "mxfp8_bf16_weight"},
}
NO_BUMP = " (judged by RCEIL, which is not the paper's exponents raised by one)"

FIGURE_4 = (  # its claims were stated to be judged together: results/prestated.md, lot 2
    ("fp32-early", EARLY, "FP32", REDRAWN, LESS, "FP32 from well before on prevents a divergence"),
    ("fp32-late", LATE, "FP32", REDRAWN, ALIKE, "FP32 from just before on does not prevent it"),
    ("bump-early", EARLY, "RCEIL", REDRAWN, ALIKE, f"exponents that avoid the last bin do not prevent it{NO_BUMP}"),
    ("bump-late", LATE, "RCEIL", REDRAWN, ALIKE, f"nor do they from just before on{NO_BUMP}"),
    (
        *("norms-early", EARLY, "norms and gains in FP32", REDRAWN, LESS),
        "norms and gains that are not quantised delay or prevent it",
    ),
    ("norms-late", LATE, "norms and gains in FP32", REDRAWN, LESS, "so do they from just before on"),
    (
        *("forward-early", EARLY, FORWARD_ONLY, "FP32", ALIKE),
        "a backward that is not quantised does as well as FP32",
    ),
    ("forward-prevents", EARLY, FORWARD_ONLY, REDRAWN, LESS, "a backward that is not quantised prevents it"),
    (
        *("activations-early", EARLY, ACTIVATIONS, REDRAWN, LESS),
        "bf16 activations in both passes delay or prevent it",
    ),
    ("activations-less-fp32", EARLY, ACTIVATIONS, "FP32", MORE, "bf16 activations do less than FP32 in the end"),
    (
        *("activations-late", LATE, ACTIVATIONS, FORWARD_ONLY, LESS),
        "from just before on bf16 activations help most: more than a backward that is not quantised",
    ),
    (
        *("activations-forward", LATE, ACTIVATIONS, "in the forward alone", LESS),
        "bf16 activations in both passes help more than in the forward alone",
    ),
    ("weights", EARLY, "bf16 weights", ACTIVATIONS, MORE, "bf16 weights help less than bf16 activations"),
)
INTERVENTIONS = tuple(
    students(
        id=f"instability-fork-{name}",
        where="section 5.2, figure 4",
        says=says,
        arms=f"forks at {point}: {change}, {against}",
        judge=Intervention(point, CHANGES[change], CHANGES[against]),
        rule=rule,
        comparisons=len(FIGURE_4),
        page="student_teacher",
        cost=lambda tables: 10.0,  # a parent and its forks: results/prestated.md, lot 2
        there="one parent a point",
        here="forks of students of 4 x 512",
    )
    for name, point, change, against, rule, says in FIGURE_4
)

GRADIENTS = "gradient_bias_again"  # gradient_bias was looked at before the rules
COUPLED = "coupled_gradient_bias"
NEAR_2 = between(1.5, 2.5, "ours: a quarter of 2")
TOGETHER = {"appendix B.1, figure 5": 3}  # how many claims of a place were stated to be judged together


def of_gradients(tables: Tables) -> float:
    """Return the minutes of a data seed: stacks in MXFP8 and in bf16, of which three side by side took 26 minutes."""
    return 2 * 26 / 3


def measured(name: str, where: str, says: str, words: str, judge: Measured, rule: Rule) -> Claim:
    return students(
        id=f"instability-{name}",
        where=where,
        says=says,
        arms=words,
        judge=judge,
        rule=rule,
        comparisons=TOGETHER.get(where, 1),
        page="student_teacher",
        cost=of_gradients,
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
        NEAR_2,
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
        NEAR_2,
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
# Six schedules of each size, with four initial seeds in two formats and two in FP32. 1.264 is the mean work of a size
# over that of 4 x 512, by layers times width squared.
OF_GRID = costs.students(mx=1.264 * 9 * 6 * 2 * 4 * 7000, fp32=1.264 * 9 * 6 * 2 * 7000)
rates = partial(students, where="appendix C.1, figure 6", page="student_teacher", there="9 sizes", cost=OF_GRID)

RATES = (
    *(
        rates(
            id=f"instability-low-rates-{name.replace(' ', '-').lower()}",
            says=f"up to 1e-4 {name} is stable",
            arms=f"{name}, 1e-5 to 1e-4",
            judge=Diverges(GRID, arm | CONSTANT | {STUDENT_LR: LOW_RATES}, over=(*SIZES, STUDENT_LR), unstable=True),
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
                GRID,
                FORMATS[name] | CONSTANT | {STUDENT_LR: 5e-4},
                FP32 | CONSTANT | {STUDENT_LR: 5e-4},
                SIZES,
                unstable=True,
            ),
            rule=MORE,
        )
        for name in ("MX mix", "E2M3")
    ),
    *(
        rates(
            id=f"instability-1e-3-{name.replace(' ', '-').lower()}",
            says=f"at 1e-3 {name} is unstable in some sizes",
            arms=name,
            judge=Diverges(GRID, arm | CONSTANT | {STUDENT_LR: 1e-3}, over=SIZES, unstable=True),
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
            FORMATS["MX mix"] | CONSTANT | {STUDENT_LR: 1e-3, WIDTH: 768},
            FORMATS["MX mix"] | CONSTANT | {STUDENT_LR: 1e-3, WIDTH: 256},
            (SIZES[1],),
            unstable=True,
        ),
        rule=MORE,
    ),
    rates(
        id="instability-cosine",
        says="a cosine from 1e-3 to 1e-5 suppresses instabilities",
        arms="MX mix: cosine, constant 1e-3",
        judge=Diverges(
            GRID,
            FORMATS["MX mix"] | COSINE,
            FORMATS["MX mix"] | CONSTANT | {STUDENT_LR: 1e-3},
            SIZES,
            unstable=True,
        ),
        rule=LESS,
    ),
    rates(
        id="instability-cosine-difference",
        says="under the cosine, too, low precision is unstable more often",
        arms="E2M3, FP32, cosine",
        judge=Diverges(GRID, FORMATS["E2M3"] | COSINE, FP32 | COSINE, SIZES, unstable=True),
        rule=MORE,
    ),
)

HEADS, MOMENTUM = "config.model.attention_heads", "config.optimizer.momentum"
SGD, ADAM = {"config.optimizer.kind": "sgd"}, {"config.optimizer.kind": "adam"}
later = partial(students, there="one run an arm or a size")

LATER = (
    *(
        later(
            id=f"instability-attention-{name}",
            where="appendix D, figure 7",
            says=f"self-attention makes low precision {words}",
            arms="MXFP8: with, without attention",
            judge=Diverges(
                ("attention",), {**MX_CODE, HEADS: (1, 2, 4, 8, 16)}, {**MX_CODE, HEADS: 0}, without_open=True
            ),
            rule=rule,
            comparisons=2,  # this figure's claims, which were stated to be judged together
            page="student_ablations",
        )
        for name, words, rule in (
            ("more", "no less stable", between(-inf, HALF, OF_FIGURE_6[1])),
            ("less", "more stable, as in the run that is shown", LESS),
        )
    ),
    *(
        later(
            id=f"instability-depth-width{suffix}",
            where="appendix E, figure 9",
            says=f"over depths and widths at 5e-4 {name} is unstable more often than FP32",
            arms=f"{name}, FP32",
            judge=Diverges(("depth_width",), FORMATS[name], FP32, SIZES, without_open=True),
            rule=MORE,
            comparisons=2,  # this figure's claims, which were stated to be judged together
            cost=lambda tables: 22.0,  # results/prestated.md, lot 2
        )
        for suffix, name in (("", "MX mix"), ("-e2m3", "E2M3"))
    ),
    *(
        later(
            id=f"instability-sgd{suffix}",
            where="appendix E, figure 10",
            says=f"{name} is more stable than Adam in low precision",
            arms=f"MXFP8: {name}, Adam",
            judge=Diverges(("optimizers",), MX_CODE | SGD | {MOMENTUM: momentum}, MX_CODE | ADAM, without_open=True),
            rule=LESS,
            comparisons=2,  # this figure's claims, which were stated to be judged together
            page="student_ablations",
        )
        for suffix, name, momentum in (("", "SGD", 0.0), ("-momentum", "SGD with momentum", 0.9))
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
