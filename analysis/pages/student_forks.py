"""Make the parts of the students' page about forks: which interventions still help once a run is about to diverge."""

from __future__ import annotations

from functools import cache, partial

import pandas as pd

from analysis.instability.fig04_interventions import judged
from analysis.pages.decisive_arms import of_arm
from analysis.pages.marks import Parts, least_and_most, rows_of, share_of
from analysis.pages.student_lots import counted, counted_and_open
from analysis.students.arms import shown_interval
from analysis.units import DATA_SEED
from mxstudy.results import markdown

CHANGED = {
    "none": "nothing (`none`)",
    "bf16_act": "activations and their gradients in bf16 (`bf16_act`)",
    "bf16_act_fwd": "activations in bf16 in the forward and where wgrad reads them (`bf16_act_fwd`)",
    "bf16_weight": "weights in bf16 in forward and dgrad (`bf16_weight`)",
    "forward_only": "nothing quantised in the backward (`forward_only`)",
    "fp32": "FP32 throughout (`fp32`)",
    "gain_fp32": "gains in FP32 (`gain_fp32`)",
    "norm_fp32": "norms and gains in FP32 (`norm_fp32`)",
    "rceil": "scales by rceil (`rceil`)",
}


@cache
def forks() -> pd.DataFrame:
    return judged(rows_of("forks", "interventions"), rows_of("runs", "interventions"))


def at(point: str, name: str) -> pd.DataFrame:
    found = forks()
    return found[(found["point"] == point) & (found["intervention"] == name)]


def interventions() -> str:
    cells = []
    for name, said in CHANGED.items():
        cell = [said]
        for point in ("0.88", "before 10"):
            own = at(point, name)
            cell += [counted_and_open(own), shown_interval(own["diverged"] > 0)]
        cells.append(cell)
    columns = ["changed from there on", "at 0.88", "95 %, forks", "10 steps before", "95 %, forks"]
    return markdown(columns, cells, left=columns)


FIRST = "0.88"
REMEDIES = ("fp32", "gain_fp32", "norm_fp32", "rceil")  # whether they help cannot be told
SOON = 20  # steps after the switch
PARENT_STEPS = 9000


def counted_at(name: str) -> str:
    return counted(at(FIRST, name))


def some_diverge() -> str:
    """Return how many forks diverge with each of the remedies: '4 to 5'."""
    return least_and_most(pd.Series([at(FIRST, name)["diverged"].sum() for name in REMEDIES]), ".0f")


def after_the_switch() -> pd.Series:
    """Return how many steps after the switch each divergence with one of the remedies comes."""
    forks = pd.concat([at(FIRST, name) for name in REMEDIES])
    return (forks["diverged_at"] - forks["step"]).dropna()


def to_go() -> pd.Series:
    control = at(FIRST, "none")
    return control["diverged_at"] - control["step"]


def same_bits() -> str:
    """Return how many unchanged forks equal their parents up to the fork's or the parent's end."""
    runs = rows_of("runs", "interventions").set_index("fingerprint")["config.steps"]
    control = forks().query("intervention == 'none'")
    longest = control["fingerprint"].map(runs).clip(upper=PARENT_STEPS - control["step"])
    return share_of(control["equal_steps"] == longest)


def the_same_arm() -> str:
    """Return how many runs of the parents' arm and data seeds diverge in `decisive`."""
    runs = of_arm("gain mx, even, floor")
    return counted(runs[runs[DATA_SEED].isin(forks()["data_seed"])])


FORKS: Parts = {
    "interventions": interventions,
    "bf16 activations at 0.88": partial(counted_at, "bf16_act"),
    "some diverge at 0.88": some_diverge,
    "parents": lambda: str(len(at(FIRST, "none"))),
    "parents diverge": lambda: least_and_most(at(FIRST, "none")["parent_diverged_at"], ",.0f"),
    "the parents' arm": the_same_arm,
    "same bits": same_bits,
    "soon": lambda: share_of(after_the_switch() <= SOON),
    "soon after": lambda: least_and_most(after_the_switch()[after_the_switch() <= SOON], ".0f"),
    "least to go": lambda: f"{to_go().min():.0f}",
    "most to go": lambda: f"{to_go().max():.0f}",
}
