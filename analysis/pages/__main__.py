"""Rewrite the numbers on the pages of results/ from the tables beside them, and leave the prose as it is.

python -m analysis.pages [PAGE ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analysis.command import Parser, command
from analysis.ledger.tables import RESULTS
from analysis.pages.approximation import APPROXIMATION
from analysis.pages.equivalence import EQUIVALENCE
from analysis.pages.fp4_sweeps import FP4
from analysis.pages.kernels import KERNELS
from analysis.pages.language_models import PRETRAIN, SENSITIVITY
from analysis.pages.learning_rate_window import WINDOW
from analysis.pages.loads import DATA, EVALUATION, LAUNCH, PROBES
from analysis.pages.marks import Parts, rewritten
from analysis.pages.mixture_losses import MOE
from analysis.pages.mixtures import MIXTURES
from analysis.pages.pilot import DECISION
from analysis.pages.reliability import CHECKPOINT, MIRROR, SOAK
from analysis.pages.shakespeare import SHAKESPEARE
from analysis.pages.side_by_side import SIDE_BY_SIDE
from analysis.pages.spike_pilot import SPIKE_PILOT
from analysis.pages.spike_proxy import PROXY
from analysis.pages.stated_lots import LR_PAIRED, OLMO_GAINS, RECIPE_23M
from analysis.pages.step_cost import TRAIN_STEP
from analysis.pages.step_parts import PARTS
from analysis.pages.student_ablations import STUDENT_ABLATIONS
from analysis.pages.student_figures import STUDENT_FIGURES
from analysis.pages.students import STUDENT_TEACHER
from analysis.pages.training_speed import ALL_GATHER, INGREDIENTS, SCALING
from analysis.pages.zero_shot import ZERO_SHOT

PAGES: dict[str, Parts] = {
    "all_gather": ALL_GATHER,
    "approximation": APPROXIMATION,
    "checkpoint": CHECKPOINT,
    "data": DATA,
    "evaluation_speed": EVALUATION,
    "experts": MIXTURES,
    "fp4_recipes": FP4,
    "kernels": KERNELS,
    "launch": LAUNCH,
    "learning_rate_window": WINDOW,
    "lr_sensitivity": SENSITIVITY,
    "lr_sensitivity_paired": LR_PAIRED,
    "moe": MOE,
    "mxnorm_equivalence": EQUIVALENCE,
    "mxnorm_pretrain": PRETRAIN,
    "olmes": ZERO_SHOT,
    "olmo_gains": OLMO_GAINS,
    "parts": PARTS,
    "prestated": DECISION,
    "probe_overhead": PROBES,
    "recipe_23m": RECIPE_23M,
    "recipe_ingredients": INGREDIENTS,
    "scaling": SCALING,
    "shakespeare": SHAKESPEARE,
    "side_by_side": SIDE_BY_SIDE,
    "soak": SOAK,
    "spike_proxy": PROXY,
    "spike_search_23m": SPIKE_PILOT,
    "student_ablations": STUDENT_ABLATIONS,
    "student_figures": STUDENT_FIGURES,
    "student_teacher": STUDENT_TEACHER,
    "tracking_load": MIRROR,
    "train_step": TRAIN_STEP,
}

# The index and the findings may have the parts of all pages.
EVERYTHING: Parts = {f"{page}: {name}": part for page, parts in PAGES.items() for name, part in parts.items()}
OF_ALL = ("README", "findings")
PAGES |= dict.fromkeys(OF_ALL, EVERYTHING)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages that differ from what the tables say, and print their names."""
    parser = Parser(__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="all if none is given")
    chosen = parser.parse_args(arguments).pages
    for name in set(chosen) - PAGES.keys():
        parser.error(f"no page is called {name}; choose from {', '.join(PAGES)}")
    for name in chosen or PAGES:
        path = RESULTS / f"{name}.md"
        before = path.read_text()
        with parser.usage_errors():
            after = rewritten(before, PAGES[name])
        if after != before:
            path.write_text(after)
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
