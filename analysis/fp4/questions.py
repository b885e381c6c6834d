"""List all questions about FP4 recipes: the contradictions, and what MXNorm does in NVFP4, stated before its runs."""

from __future__ import annotations

from analysis.fp4.arms import BF16
from analysis.fp4.contradictions import CONTRADICTIONS, alike, better_nv
from analysis.stated import Question
from analysis.units import NORM, PLAN

NORMS = {  # {arm: kind, whether the gain is folded into the next weight, and whether it is in dgrad's operand as well}
    "RMSNorm": ("rmsnorm", False, False),
    "RMSNorm, folded": ("rmsnorm", True, False),
    "MXNorm": ("mxnorm", None, False),  # it always folds
    "MXNorm, gain in dgrad": ("mxnorm", None, True),
}
MXNORM_IN_NVFP4 = Question(
    "fp4_norms",
    "Does MXNorm end as RMSNorm does in NVFP4, and is one weight in forward and dgrad better?",
    {"bf16": BF16}
    | {
        name: {
            PLAN: "nvfp4",
            NORM: kind,
            "config.norm.fold_gain": folds,
            "config.norm.fold_gain_in_dgrad": in_dgrad,
        }
        for name, (kind, folds, in_dgrad) in NORMS.items()
    },
    (
        alike("fp4-norms-fold", "ours", "RMSNorm with a folded gain ends as without", "RMSNorm, folded", "RMSNorm"),
        alike("fp4-norms-mxnorm", "MXNorm, sections 4.1 and 4.3", "MXNorm ends as RMSNorm", "MXNorm", "RMSNorm"),
        better_nv(
            "fp4-norms-consistent",
            "arXiv 2509.25149",
            "with a folded gain one weight in forward and dgrad is better",
            "MXNorm, gain in dgrad",
            "MXNorm",
        ),
    ),
)
QUESTIONS = (*CONTRADICTIONS, MXNORM_IN_NVFP4)
