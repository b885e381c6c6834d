"""Decide the pilot of the spike study by its rule, and make its parts of the page.

The rule was stated before the runs, in results/prestated.md, "Lot 8: spikes, the pilot". No claim uses these runs.
"""

from __future__ import annotations

from functools import partial

import pandas as pd

from analysis.pages.language_models import LOSS, NORM_CHOICE, NORMS
from analysis.pages.marks import Parts, rows_of
from analysis.pages.stated_lots import finished
from analysis.units import RATE, died, power
from mxstudy.results import markdown

SWEEP, BETA2 = "spike_search_23m", "config.optimizer.betas.1"


def runs() -> pd.DataFrame:
    return rows_of("runs", SWEEP)


def chosen(runs: pd.DataFrame) -> tuple[float, float] | None:
    """Return the lowest learning rate, and its lower beta2, at which a run has a spike and none diverges, or None."""
    for (rate, beta2), own in runs.groupby([RATE, BETA2]):
        if own["spikes"].any() and not died(own, LOSS).any():
            return float(rate), float(beta2)
    return None


def setting() -> str:
    found = chosen(runs())
    return "none" if found is None else f"{power(found[0])} with beta2 {found[1]}"


def table() -> str:
    cells = [
        (
            power(run[RATE]),
            run[BETA2],
            NORMS[run[NORM_CHOICE]],
            f"{run[LOSS]:.3f}",
            f"{run['spike_score']:.1f}",
            run["spikes"],
        )
        for _, run in runs().sort_values([RATE, BETA2, NORM_CHOICE], ascending=[True, True, False]).iterrows()
    ]
    columns = ["learning rate", "beta2", "norm", "validation loss", "spike score (Eq. 22)", "events of the detector"]
    return markdown(columns, cells, left=columns[:3])


SPIKE_PILOT: Parts = {
    "table": table,
    "finished": partial(finished, SWEEP),
    "spikes": lambda: str(int(runs()["spikes"].sum())),
    "setting": setting,
}
