"""Make the parts of the students' page about forks: which interventions still help once a run is about to diverge."""

from __future__ import annotations

from functools import cache, partial

import pandas as pd

from analysis.instability.fig04_interventions import CONTROLS, REDRAWN, with_outcomes
from analysis.pages.marks import Parts, least_and_most, rows_of, share_of
from analysis.pages.student_lots import counted, counted_and_open, shown
from analysis.students.arms import difference, shown_interval
from mxstudy.results import markdown

CHANGED = {
    "none": "nothing (`none`)",
    REDRAWN: "one bit of one weight (`perturbed`)",
    "bf16_act": "activations and their gradients in bf16 (`bf16_act`)",
    "bf16_act_fwd": "activations in bf16 in the forward and where wgrad reads them (`bf16_act_fwd`)",
    "bf16_weight": "weights in bf16 in forward and dgrad (`bf16_weight`)",
    "forward_only": "nothing quantised in the backward (`forward_only`)",
    "fp32": "FP32 throughout (`fp32`)",
    "gain_fp32": "gains in FP32 (`gain_fp32`)",
    "norm_fp32": "norms and gains in FP32 (`norm_fp32`)",
    "rceil": "scales by rceil (`rceil`)",
}


WITH_CONTROL, WITHOUT_CONTROL = "interventions_2", "interventions"  # the tables of four parents, and of two
POINTS = FIRST, LAST = "0.88", "before 10"


@cache
def forks(table: str) -> pd.DataFrame:
    return with_outcomes(rows_of("forks", table), rows_of("runs", table))


def at(point: str, name: str, table: str) -> pd.DataFrame:
    found = forks(table)
    return found[(found["point"] == point) & (found["intervention"] == name)]


def with_control() -> str:
    """Return the table of the forks that have a redraw of MXFP8 to be compared with, by point."""
    columns = ["changed from there on", "at 0.88", "minus the redraw", "10 steps before", "minus the redraw"]
    cells = []
    for name, said in CHANGED.items():
        own = {point: at(point, name, WITH_CONTROL) for point in POINTS}
        if len(own[FIRST]):
            cells.append([said, *(cell for point in POINTS for cell in counted_against(own[point], point, name))])
    return markdown(columns, cells, left=columns)


def counted_against(own: pd.DataFrame, point: str, name: str) -> tuple[str, str]:
    """Return how many forks diverged, and minus the redraw. Open forks are in no fraction, as was stated before."""
    if name == REDRAWN:
        return counted_and_open(own), "-"
    redrawn = at(point, REDRAWN, WITH_CONTROL)
    return counted_and_open(own), shown(difference(own[~own["open"]], redrawn[~redrawn["open"]]))


def without_control() -> str:
    """Return the table of the earlier forks, which have no redraw."""
    columns = ["changed from there on", "at 0.88", "95 %, forks", "10 steps before", "95 %, forks"]
    cells = []
    for name, said in CHANGED.items():
        own = [at(point, name, WITHOUT_CONTROL) for point in POINTS]
        if len(own[0]):
            cells.append([said, *(cell for one in own for cell in (counted_and_open(one), interval(one)))])
    return markdown(columns, cells, left=columns)


def interval(own: pd.DataFrame) -> str:
    return shown_interval(own["diverged"] > 0)


SOON = 20  # steps after the switch
PARENT_STEPS = 9000
CHANGES = tuple(name for name in CHANGED if name not in CONTROLS)


def counted_at(name: str, table: str = WITH_CONTROL, point: str = FIRST) -> str:
    """Return how many of the forks from a point diverge with an intervention: '16 of 19'."""
    return counted(at(point, name, table))


def after_the_switch(point: str, *names: str) -> pd.Series:
    """Return how many steps after its fork at a point each replica diverges with these interventions."""
    own = forks(WITH_CONTROL).query("point == @point and intervention in @names").set_index(["data_seed", "seed"])
    return (own["diverged_at"] - own["step"]).dropna()


def soon() -> pd.Series:
    """Return those steps for the divergences that a change sets off soon after the switch at 0.88."""
    return after_the_switch(FIRST, *CHANGES)[lambda steps: steps <= SOON]


def median_late(*names: str) -> pd.Series:
    """Return the median steps to a divergence with each of these interventions, 10 steps before."""
    return pd.Series([after_the_switch(LAST, name).median() for name in names])


def sooner_than_the_redraw(name: str) -> str:
    """Return how many replicas that diverge with both do so sooner with the intervention: '12 of 16'."""
    later = after_the_switch(LAST, REDRAWN) - after_the_switch(LAST, name)
    return share_of(later.dropna() > 0)


def to_go() -> pd.Series:
    """Return how many steps after the switch at 0.88 each fork without a change diverges."""
    control = at(FIRST, "none", WITH_CONTROL)
    return control["parent_diverged_at"] - control["step"]


def same_bits(table: str) -> str:
    """Return how many unchanged forks equal their parents up to the fork's or the parent's end."""
    runs = rows_of("runs", table).set_index("fingerprint")["config.steps"]
    control = forks(table).query("intervention == 'none'")
    longest = control["fingerprint"].map(runs).clip(upper=PARENT_STEPS - control["step"])
    return share_of(control["equal_steps"] == longest)


FORKS: Parts = {
    "forks with a redraw": with_control,
    "forks without a redraw": without_control,
    "redraw at 0.88": partial(counted_at, REDRAWN),
    "FP32 at 0.88": partial(counted_at, "fp32"),
    "rceil at 0.88": partial(counted_at, "rceil"),
    "bf16 activations at 0.88": partial(counted_at, "bf16_act", WITHOUT_CONTROL),
    **{
        f"{words} before 10": partial(counted_at, name, point=LAST)
        for words, name in (
            ("bf16 activations", "bf16_act"),
            ("forward's activations", "bf16_act_fwd"),
            ("redraw", REDRAWN),
        )
    },
    "parents": lambda: str(len(at(FIRST, "none", WITH_CONTROL))),
    "parents diverge": lambda: least_and_most(at(FIRST, "none", WITH_CONTROL)["parent_diverged_at"], ",.0f"),
    "earlier parents": lambda: str(len(at(FIRST, "none", WITHOUT_CONTROL))),
    "same bits": partial(same_bits, WITH_CONTROL),
    "same bits, earlier": partial(same_bits, WITHOUT_CONTROL),
    "soon": lambda: share_of(after_the_switch(FIRST, *CHANGES) <= SOON),
    "soon after": lambda: least_and_most(soon(), ".0f"),
    "replicas, soon": lambda: str(soon().index.nunique()),
    "median late, redraw": lambda: f"{median_late(REDRAWN)[0]:g}",
    "median late, changed": lambda: least_and_most(median_late("fp32", "norm_fp32", "gain_fp32", "rceil"), "g"),
    "FP32 sooner": partial(sooner_than_the_redraw, "fp32"),
    "norms sooner": partial(sooner_than_the_redraw, "norm_fp32"),
    "redraw, steps after": lambda: " and ".join(f"{steps:.0f}" for steps in sorted(after_the_switch(FIRST, REDRAWN))),
    "least to go": lambda: f"{to_go().min():.0f}",
    "most to go": lambda: f"{to_go().max():,.0f}",
}
