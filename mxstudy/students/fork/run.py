"""Run interventions: repeat a student-teacher run from shortly before its divergence with something changed.

Instability paper, section 5.2, figure 4. A fork first replays its parent bit by bit up to the fork point, or fails.
With nothing changed it is the control and equals the parent bit by bit. A run takes seconds to minutes, so a killed one
starts over.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch

from mxstudy import results
from mxstudy.config import Fork, StudentTeacher
from mxstudy.model.backends import backends_of
from mxstudy.model.describe_precision import describe
from mxstudy.probes.outcomes import outcome_of
from mxstudy.reader import plain
from mxstudy.results.terminal import markdown, show
from mxstudy.students.fork.check import parent_of
from mxstudy.students.fork.points import (
    ForkPoint,
    changed,
    equal_bits,
    fork_points,
    forked,
    leading_true,
    replay,
    run_on,
    waves,
)
from mxstudy.students.stack import Stack, apply_run_precision, build_student
from mxstudy.tracking.columnar_journal import read_columns
from mxstudy.tracking.folder import CHECKPOINT, RunFolder
from mxstudy.tracking.journal import Row, replace_journal
from mxstudy.tracking.mlflow_parent import Summary
from mxstudy.train.checkpoint import Checkpoints
from mxstudy.train.recorder import finish_and_mirror
from mxstudy.train.runtime import configure_torch, resolve_device

TITLE = "forks that diverge, among those whose parent diverges"
COLUMNS = ("arm", "at", "forks", "diverged", "open", "loss, median", "steps as parent")
NOTES = [
    "open: at the end the loss is over 10 times its best, but not for long enough to say that it stays there",
    "steps as parent: how many first steps equal the parent's bit by bit, the least over the forks",
]


def run(config: Fork, folder: RunFolder, label: str) -> str:
    """Replay the parent, run the forks, judge each by its losses after its parent's, and return the state."""
    device = resolve_device(config.device, "device")
    parent, of_parent = parent_of(config)
    recorded = read_columns(parent.columns, len(of_parent.replicas))
    how = config.intervention
    points, of_forks = fork_points(config, recorded[:, 0]), changed(of_parent, how)
    with folder.lock(), folder.heartbeat():
        folder.update(state="running", steps=config.steps, reason=None)
        configure_torch(of_parent.train.compile)
        stack = Stack(of_parent, device)
        load_latest(parent, of_parent, stack, before=min(point.step for point in points))
        plan, described = planned(of_forks, device)
        print(f"{label}  {len(points)} forks; the parent goes on from step {int(stack.step)}\n{described}", flush=True)
        states = replay(stack, points, recorded)
        parts = []
        for wave in waves(points, len(of_parent.replicas)):
            of_wave = [states[point] for point in wave]
            forks_of_wave = forked(of_forks, of_parent, wave, of_wave, how.new_optimizer, how.perturbed_weight)
            parts.append(run_on(forks_of_wave, config.steps)[:, :, : len(wave)])
        values = np.concatenate(parts, axis=-1)
        forks = forks_table(points, of_parent, recorded, values)
        results.save_table(folder, "forks", forks.assign(parent=parent.status().fingerprint))
        results.save_table(folder, "fork_metrics", metrics_table(points, values))
        record(folder, config.steps, plan)
        show_forks({label: folder})
        folder.update(step=config.steps)
        finish_and_mirror(config, folder, label)
    return "finished"


def planned(of_forks: StudentTeacher, device: torch.device) -> tuple[Row, str]:
    """Return the precision and the backends of the forks' layers, as a row of the journal and as text."""
    with torch.device("meta"):
        model = build_student(of_forks)
    recipes = apply_run_precision(model, of_forks, 0, device)
    return {"precision": recipes, "backends": backends_of(model)}, describe(model, recipes)


def load_latest(parent: RunFolder, of_parent: StudentTeacher, stack: Stack, before: int) -> None:
    """Load the parent's last checkpoint at or before step `before` into the stack, if there is one."""
    checkpoints = Checkpoints(parent.checkpoints, parent.status().fingerprint, plain(of_parent), keep_last=1)
    steps = parent.checkpoint_steps()
    usable = [step for step in steps if step <= before]
    if usable:
        checkpoints.load(parent.checkpoints / f"{CHECKPOINT}{max(usable):08d}", stack.named_state())


def forks_table(
    points: list[ForkPoint], parent: StudentTeacher, recorded: np.ndarray, values: np.ndarray
) -> pd.DataFrame:
    """Return a row per fork: its point, its replica, and the outcome of its losses after its parent's.

    `equal_steps`: the number of the fork's first steps that equal the parent's bit by bit.
    """
    rows = []
    for number, point in enumerate(points):
        curve = np.concatenate((recorded[: point.step, 0, point.replica], values[:, 0, number]))
        after = recorded[point.step : point.step + len(values), :, point.replica]
        same = np.all(equal_bits(values[: len(after), :, number], after), axis=1)
        end = outcome_of(curve)
        seed, lr = parent.replicas[point.replica]
        rows.append(
            {
                "fork": number,
                "replica": point.replica,
                "seed": seed,
                "data_seed": parent.data_seed,
                "lr": lr,
                "point": point.point,
                "step": point.step,
                "parent_diverged_at": point.diverged_at,
                "loss": float(values[-1, 0, number]),
                "equal_steps": leading_true(same),
                "diverged_at": end.diverged_at,
                "rising_at": end.rising_at,
            }
        )
    return pd.DataFrame(rows)


def metrics_table(points: list[ForkPoint], values: np.ndarray) -> pd.DataFrame:
    """Return a row per fork and step with loss and gradient norm."""
    steps = len(values)
    return pd.DataFrame(
        {
            "fork": np.repeat(np.arange(len(points)), steps),
            "step": np.concatenate([point.step + np.arange(steps) for point in points]),
            "loss": values[:, 0].T.ravel(),
            "grad_norm": values[:, 1].T.ravel(),
        }
    )


def record(folder: RunFolder, steps: int, plan: Row) -> None:
    """Write the journal for MLflow: the forks' plan, and the fraction of forks that diverge, by point."""
    forks = results.load_table([folder], "forks")
    shares = forks["diverged_at"].notna().groupby(forks["point"]).mean()
    values = {f"diverged_fraction/{point}": float(share) for point, share in shares.items()}
    measured = {"step": steps, "probe": "interventions", "values": values}
    replace_journal(folder.journal_path, [{"step": 0} | plan, measured])


def summarise(runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
    return Summary("\n\n".join([markdown(TITLE, COLUMNS, show_forks(runs)), *NOTES]))


def show_forks(runs: Mapping[str, RunFolder]) -> list[tuple[str, ...]]:
    """Print the table of forks by run and point, and return its rows as text. `runs` is {name: run}."""
    cells = []
    for name, folder in runs.items():
        for point, own in results.load_table([folder], "forks").groupby("point"):
            counts = (len(own), own["diverged_at"].notna().sum(), own["rising_at"].notna().sum())
            numbers = (*counts, f"{own['loss'].median():.3g}", own["equal_steps"].min())
            cells.append((name, str(point), *map(str, numbers)))
    show(TITLE, COLUMNS, cells, NOTES)
    return cells
