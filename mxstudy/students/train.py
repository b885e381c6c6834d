"""Run a student-teacher study: replicas of a student learn a fixed teacher (instability paper, section 4).

Arms of a comparison differ only in their configs: they share initial weights, inputs, noise and, unless it is
quantised, the teacher.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import numpy as np
import torch

from mxstudy.config import StudentTeacher
from mxstudy.model.backends import backends_of
from mxstudy.model.describe_precision import describe
from mxstudy.reader import plain
from mxstudy.students.stack import Stack
from mxstudy.students.stack_probes import StackProbes, fp32_twin
from mxstudy.students.tables import show_arms
from mxstudy.tracking.columnar_journal import NAMES, ROWS, Columns
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import Row
from mxstudy.train.checkpoint import Checkpoints
from mxstudy.train.loop import is_due
from mxstudy.train.progress import Progress
from mxstudy.train.recorder import Recorder, TensorsOf, record_end
from mxstudy.train.runtime import configure_torch, resolve_device
from mxstudy.train.signals import Leave

PROBE = "probe."  # begins the names of the probes' tensors in a checkpoint
SHOWN_EVERY = 50  # steps between the rows of the journal, which MLflow gets; `Columns` has all steps


def run(config: StudentTeacher, folder: RunFolder, label: str) -> str:
    """Train, or resume from the last checkpoint. Return finished, diverged (every replica did) or preempted."""
    device = resolve_device(config.train.device)
    configure_torch(config.train.compile)
    with folder.lock(), folder.heartbeat():
        folder.update(state="running", steps=config.train.steps, reason=None)
        stack = Stack(config, device)
        twin = Stack(fp32_twin(config), device) if config.probe.gradient_bias.coupled else None
        probes = StackProbes(config.probe, stack, twin)
        tensors = partial(named_state, probes)
        fingerprint, keep_last = folder.status().fingerprint, config.checkpoint.keep_last
        checkpoints = Checkpoints(folder.checkpoints, fingerprint, plain(config), keep_last)
        latest = checkpoints.latest()
        start = checkpoints.load(latest, tensors(), older_lack=PROBE) if latest else 0
        plan, replicas = set_precision(stack, start), len(config.replicas)
        parameters = sum(p.numel() for p in stack.model.parameters()) // replicas
        described = describe(stack.model, plan["precision"])
        print(f"{replicas} replicas of {parameters:,} parameters on {device}\n{described}", flush=True)
        with Leave() as leave, StackRecorder(config, folder, label, start, checkpoints, tensors) as recorder:
            recorder.record({"step": start, "parameters": parameters} | plan)
            state = train(probes, start, recorder, leave)
            why = f"none of {replicas} replicas is finite" if state == "diverged" else None
            record_end(recorder, folder, state, why, leave)
        if state != "preempted":
            show_arms([folder])
    return state


def set_precision(stack: Stack, step: int) -> Row:
    """Set casts and backends to those of this step. Return the journal's row: {linear: recipe}, {block: backend}."""
    return {"precision": stack.set_precision(step), "backends": backends_of(stack.model)}


def named_state(probes: StackProbes) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of a checkpoint: the state of the stack, of its twin if it has one, and of its probes."""
    twin_state = probes.twin.named_state() if probes.twin else {}
    beside = {"twin.": twin_state, PROBE: probes.named_state()}
    return probes.stack.named_state() | {
        prefix + name: tensor for prefix, state in beside.items() for name, tensor in state.items()
    }


def replica_names(config: StudentTeacher) -> list[str]:
    """Return the replicas' names: seed0, or seed0_lr0.0006 if there are several learning rates."""
    several = len(config.lrs) > 1
    return [f"seed{seed}_lr{lr:g}" if several else f"seed{seed}" for seed, lr in config.replicas]


def train(probes: StackProbes, start: int, recorder: StackRecorder, leave: Leave) -> str:
    """Train from step `start` to the end, a signal, or the step at which no replica is finite. Return the state.

    The device is read only at the stops (`next_stop`), so that steps between two stops run without waiting.
    """
    stack, config = probes.stack, probes.stack.config
    stacks = [stack, probes.twin] if probes.twin else [stack]
    step, steps, starts = start, config.train.steps, [row.from_step for row in config.precision.schedule]
    while step < steps:
        if step in starts and step > start:
            recorder.record({"step": step} | set_precision(stack, step))
        for row in probes.measure(step):
            recorder.record(row)
        first, stop, began_s = step, next_stop(config, step), time.perf_counter()
        while step < stop and (step == first or not leave.signal):
            for each in stacks:
                each.train_step()
            step += 1
        values = stack.record[first % ROWS :][: step - first].cpu().numpy()
        seconds, end = time.perf_counter() - began_s, step_of_death(values)
        if end is not None:
            step, values = first + end, values[: end + 1]
            recorder.extend(first, values, seconds, last=True)
            stack.step.fill_(step)  # no weight has changed since
            recorder.save(step)
            return "diverged"
        recorder.extend(first, values, seconds, last=step == steps)
        if step == steps or leave.signal or is_due(step, config.checkpoint.every_steps):
            recorder.save(step)
        if leave.signal and step < steps:
            return "preempted"
    return "finished"


def next_stop(config: StudentTeacher, step: int) -> int:
    """Return the first step after `step` before which something is due, or the stack's record is full."""
    every = {ROWS, config.checkpoint.every_steps, *(probe.every_steps for probe in vars(config.probe).values())} - {0}
    fixed = [config.train.steps, *(row.from_step for row in config.precision.schedule)]
    return min([n * (step // n + 1) for n in every] + [s for s in fixed if s > step])


def step_of_death(values: np.ndarray) -> int | None:
    """Return the first row of `values` [steps, 2, S] from which on no replica is finite, or None if there is none."""
    alive = np.flatnonzero(np.isfinite(values).all(axis=1).any(axis=1))
    first_dead = int(alive[-1]) + 1 if len(alive) else 0
    return first_dead if first_dead < len(values) else None


class StackRecorder(Recorder):
    """Records a stack: every step in the columns, and some of them also in the journal."""

    def __init__(
        self,
        config: StudentTeacher,
        folder: RunFolder,
        label: str,
        start: int,
        checkpoints: Checkpoints,
        tensors: TensorsOf,
    ) -> None:
        self.columns, self.names = Columns(folder.columns, len(config.replicas), start), replica_names(config)
        progress = Progress(label, config.train.steps, rate="replica_steps_per_s")
        super().__init__(config, folder, progress, start, checkpoints, tensors)

    def extend(self, first: int, values: np.ndarray, seconds: float, last: bool) -> None:
        """Record the steps from `first` on, `values` [steps, 2, S]; the journal gets every SHOWN_EVERY-th and the last.

        `last`: whether the final row is the run's last step.
        """
        self.columns.append(values)
        final = first + len(values) - 1
        for step in range(first, final + 1):
            if step % SHOWN_EVERY == 0 or (last and step == final):
                self.record({"step": step, "probe": "replicas", "values": self.named(values[step - first])})
        rate = len(values) * values.shape[-1] / seconds
        self.show({"step": final, "loss": median(values[-1, 0]), "replica_steps_per_s": rate})

    def named(self, row: np.ndarray) -> Mapping[str, float]:
        """Return `row` [2, S] by name, after the median of the finite losses and the count of replicas not finite."""
        alive = np.isfinite(row).all(axis=0)
        summary = {"train/loss": median(row[0]), "train/not_finite": int((~alive).sum())}
        return summary | {
            f"{quantity}/{name}": float(value)
            for quantity, column in zip(NAMES, row, strict=True)
            for name, value in zip(self.names, column, strict=True)
        }

    def save(self, step: int) -> None:
        self.columns.flush()  # first, because a run that resumes from the checkpoint needs these steps
        super().save(step)


def median(losses: np.ndarray) -> float:
    """Return the median of the finite losses, or NaN if there is none."""
    finite = losses[np.isfinite(losses)]
    return float(np.median(finite)) if len(finite) else float("nan")
