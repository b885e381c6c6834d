"""Make the parts of the page about figures 2, 7 and 10 of the instability paper: activation, attention, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pandas as pd

from analysis.ledger.instability import ACTIVATION, DEPTH
from analysis.ledger.instability_runs import HEADS, MOMENTUM
from analysis.pages.marks import Parts, rows_of, share_of
from analysis.pages.stated_lots import decided, verdicts
from analysis.pages.student_lots import SPIKES, counted, final, lot, spikes_in_runs, table_of_arms
from analysis.students.arms import middle_step, quartiles, unstable
from analysis.units import Arm, chosen

PAGE = "student_ablations"
MAIN, ATTENTION, PLAIN, WITH_MOMENTUM = "main run", "with attention", "SGD", "SGD with momentum"
OF: dict[str, tuple[str, Arm]] = {  # {arm: its tables in results/, its settings}
    MAIN: ("attention", {HEADS: 0}),
    ATTENTION: ("attention", {HEADS: 8}),
    PLAIN: ("optimizers", {"config.optimizer.kind": "sgd", MOMENTUM: 0.0}),
    WITH_MOMENTUM: ("optimizers", {"config.optimizer.kind": "sgd", MOMENTUM: 0.9}),
    "GELU, 3 layers": ("activations_and_norm", {ACTIVATION: "gelu", DEPTH: 3}),
    "SwiGLU, 3 layers": ("activations_and_norm", {ACTIVATION: "swiglu", DEPTH: 3}),
    "SwiGLU, 4 layers": ("activations_and_norm", {ACTIVATION: "swiglu", DEPTH: 4}),
}
ACTIVATIONS = {  # {activation: {its number of layers: arm}}
    "SwiGLU": {"three layers": "SwiGLU, 3 layers", "four layers": "SwiGLU, 4 layers"},
    "GELU": {"three layers": "GELU, 3 layers", "four layers": MAIN},
}


def runs_of(name: str, settings: Arm) -> pd.DataFrame:
    runs = lot(name)
    return runs[chosen(runs, settings)]


ARMS: dict[str, Callable[[], pd.DataFrame]] = {name: partial(runs_of, *of) for name, of in OF.items()}


def final_loss(runs: pd.DataFrame) -> str:
    return "-" if unstable(runs).all() else f"{final(runs):.4f}"


def over_main_run(name: str) -> str:
    """Return how many times the main run's final loss an arm's is: '130 times'."""
    return f"{final(ARMS[name]()) / final(ARMS[MAIN]()):.3g} times"


def count(name: str) -> str:
    return counted(ARMS[name]())


def of_activation(name: str) -> pd.DataFrame:
    """Return the runs with an activation, those with three and with four layers."""
    return pd.concat([ARMS[arm]() for arm in ACTIVATIONS[name].values()])


def loss_of(name: str) -> str:
    return final_loss(ARMS[name]())


def median_of_all(name: str) -> str:
    """Return the median final loss of all runs of an arm, diverged or not."""
    return f"{quartiles(ARMS[name]()['loss'])[1]:.4f}"


def median_step(name: str) -> str:
    return middle_step(ARMS[name]()["outcome.diverged_at"])


def first_loss() -> str:
    """Return the median of the main runs' losses at the first step."""
    runs, losses = ARMS[MAIN](), rows_of("metrics", "attention")
    own = losses.merge(runs[["fingerprint", "replica"]])
    return f"{own.loc[own['step'] == own['step'].min(), 'loss'].median():.2f}"


def count_of_activation(name: str) -> str:
    return counted(of_activation(name))


def by_step(step: int, name: str) -> str:
    """Return how many runs with an activation have diverged by a step, of all: '41 of 64'."""
    return share_of(of_activation(name)["outcome.diverged_at"] <= step)


def jumping(name: str) -> str:
    """Return how many runs with an activation have a loss over 100 times the one before."""
    return share_of(of_activation(name)["outcome.spikes"] > 0)


def first_jump() -> str:
    """Return the first step with a loss over 100 times the one before, of all runs with SwiGLU."""
    return f"{of_activation('SwiGLU')['outcome.first_spike'].min():,.0f}"


STUDENT_ABLATIONS: Parts = {
    "decided": partial(decided, PAGE),
    "verdicts": partial(verdicts, PAGE),
    "arms": partial(table_of_arms, ARMS, **{SPIKES: spikes_in_runs, "final loss": final_loss}),
    **{name: partial(count, name) for name in (MAIN, ATTENTION, PLAIN)},
    **{f"step, {name}": partial(median_step, name) for name in (MAIN, ATTENTION)},
    **{f"loss, {name}": partial(loss_of, name) for name in (MAIN, PLAIN, WITH_MOMENTUM)},
    **{f"loss over the main run's, {name}": partial(over_main_run, name) for name in (PLAIN, WITH_MOMENTUM)},
    "loss of all, Adam": partial(median_of_all, MAIN),
    "Adam's runs that stay down": lambda: share_of(~unstable(ARMS[MAIN]())),
    **{
        f"{name} with {layers}": partial(count, arm)
        for name, arms in ACTIVATIONS.items()
        for layers, arm in arms.items()
    },
    **{name: partial(count_of_activation, name) for name in ACTIVATIONS},
    **{f"{name} jumping": partial(jumping, name) for name in ACTIVATIONS},
    **{f"{name} by step 6,000": partial(by_step, 6000, name) for name in ACTIVATIONS},
    "first jump": first_jump,
    "first loss": first_loss,
}
