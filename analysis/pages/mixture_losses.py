"""Make the parts of the page about a mixture of experts: how its pairs of runs end, how its router spreads tokens."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from analysis.pages.language_models import NORM_CHOICE
from analysis.pages.marks import Parts, rows_of, share_of
from analysis.pages.stated_lots import arms, judged, minus, parts, runs_of
from analysis.stated import Question
from analysis.statistics import Effect
from analysis.units import PLAN, SEED, chosen
from mxstudy.results import markdown

MIXTURE = Question(
    "moe",
    "Does a mixture of experts end at bf16's loss in MXFP8?",
    {
        "bf16, RMSNorm": {PLAN: "bf16"},
        "MXFP8, RMSNorm": {PLAN: "mxfp8", NORM_CHOICE: "rmsnorm"},
        "MXFP8, MXNorm p=2": {PLAN: "mxfp8", NORM_CHOICE: "mxnorm_p2"},
    },
    (),
)
LAST = 780  # the last step at which the routing was measured
SHOWN_STEPS = (0, 1, 3, 5, 7, 15, 31, 59)  # of the run on one GPU and on two


def pairs() -> pd.Series:
    """Return the differences of the logarithms of MXFP8's and bf16's loss, by pair of seeds."""
    (one,) = judged(MIXTURE.sweep)
    found = one.evidence.found if one.evidence else None
    assert isinstance(found, Effect)
    return found.units


def percent(logarithm: float) -> str:
    """Return a difference of logarithms in percent of bf16's loss: '+1.79 %'."""
    return f"{100 * np.expm1(logarithm):+.2f} %"


def within() -> str:
    """Return how many pairs lie in the range that the claim's rule names."""
    (one,) = judged(MIXTURE.sweep)
    return share_of(pairs().between(one.claim.rule.reproduced.low, one.claim.rule.reproduced.high))


def mxnorm_minus_rmsnorm() -> str:
    """Return the loss of MXNorm minus that of RMSNorm, both in MXFP8, by pair of seeds: '+0.0750 and -0.0188'."""
    found = minus(MIXTURE, "MXFP8, MXNorm p=2", "MXFP8, RMSNorm")
    assert found is not None
    return " and ".join(f"{value:+.4f}" for value in found)


def losses_of(arm: str) -> pd.DataFrame:
    """Return an arm's validation losses: a row for each seed, a column for each step."""
    runs, measured = runs_of(MIXTURE.sweep), rows_of("validation", MIXTURE.sweep)
    assert runs is not None
    own = runs.loc[chosen(runs, MIXTURE.arms[arm]), ["fingerprint", SEED]].merge(measured)
    return own.pivot(index=SEED, columns="step", values="validation_loss")


def by_step() -> str:
    """Return the table of MXFP8's validation loss minus bf16's, both with RMSNorm, by seed and step."""
    less = losses_of("MXFP8, RMSNorm") - losses_of("bf16, RMSNorm")
    cells = [(f"{seed}", *(f"{value:+.3f}" for value in row)) for seed, *row in less.itertuples()]
    return markdown(["seed", *(f"step {step + 1}" for step in less)], cells, left=[])


def falls() -> str:
    """Return by how much bf16's validation loss falls between the last two measurements, on average over seeds."""
    *_, before, last = losses_of("bf16, RMSNorm").mean()
    return f"{before - last:.2f}"


def ends() -> str:
    """Return the lowest and the highest validation loss with which bf16's seeds end: '2.49 to 2.64'."""
    last = losses_of("bf16, RMSNorm").iloc[:, -1]
    return f"{last.min():.2f} to {last.max():.2f}"


def routing() -> str:
    """Return how the router spreads the tokens of a late step, by arm: means over seeds and layers."""
    runs, measured = runs_of(MIXTURE.sweep), rows_of("routing", MIXTURE.sweep).query("step == @LAST")
    assert runs is not None
    cells = []
    for name, arm in MIXTURE.arms.items():
        own = measured[measured["fingerprint"].isin(runs.loc[chosen(runs, arm), "fingerprint"])]
        if own.empty:
            continue
        loads = own.filter(like="/loads").stack()
        busiest = [len(shares) * max(shares) for shares in loads]
        idle, padding = own.filter(like="/idle").to_numpy(), own.filter(like="/padding").to_numpy()
        cells.append((name, f"{np.mean(busiest):.2f}", f"{idle.sum():.0f}", f"{100 * padding.mean():.1f} %"))
    columns = ("arm", "tokens of the busiest expert over a balanced share", "experts without a token", "padding")
    return markdown(columns, cells, left=["arm"])


def on_two_gpus() -> str:
    """Return the table of the losses of a run of one config on one GPU and on two, by step."""
    one, two = (rows_of("metrics", f"moe_on_{gpus}").set_index("step")["loss"] for gpus in ("one", "two"))
    cells = [
        (
            f"{step + 1}",
            f"{one[step]:.4f}",
            f"{two[step]:.4f}",
            f"{two[step] - one[step]:+.2g}" if two[step] != one[step] else "0",
        )
        for step in SHOWN_STEPS
    ]
    return markdown(["step", "loss, one GPU", "loss, two GPUs", "two minus one"], cells, left=[])


def apart_on_two_gpus() -> str:
    """Return the final validation loss on two GPUs minus that on one."""
    one, two = (rows_of("validation", f"moe_on_{gpus}")["validation_loss"].iloc[-1] for gpus in ("one", "two"))
    return f"{two - one:+.3f}"


MOE: Parts = {
    **parts(MIXTURE.sweep),
    "arms": partial(arms, MIXTURE),
    "routing": routing,
    "by step": by_step,
    "falls": falls,
    "ends": ends,
    "MXNorm minus RMSNorm": mxnorm_minus_rmsnorm,
    "pairs below": lambda: share_of(pairs() < 0),
    "pairs within": within,
    "mean": lambda: percent(pairs().mean()),
    "least and most": lambda: f"{percent(pairs().min()).removesuffix(' %')} to {percent(pairs().max())}",
    "on two GPUs": on_two_gpus,
    "apart on two GPUs": apart_on_two_gpus,
    "mean without the largest": lambda: percent(pairs().sort_values().iloc[:-1].mean()),
}
