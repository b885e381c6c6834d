"""Fork a stack: continue each replica from its state at its own fork point, with something changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from mxstudy import config
from mxstudy.probes.outcomes import outcome_of
from mxstudy.reader import ConfigError, plain, require
from mxstudy.students.stack import Stack
from mxstudy.tracking.columnar_journal import ROWS

ReplicaState = dict[str, Tensor]  # of one replica, with the names of Stack.named_state()

# The section of a run's config that holds each key of an intervention.
GROUPS = {
    "scale_rule": "precision",
    "gain": "student",
    "vector_ops": "student",
    "norm_ops": "student",
    "freeze_norm_bias": "student",
    "compute": "train",
}
PERTURBED = "layers.0.up.weight"  # `perturbed_weight` names an element of this weight
LAST_KEPT_BIT = 1 << 20  # of an FP32 mantissa of 23 bits: the last of the three that E4M3 keeps
TARGETS = {"disk": {"quantized": False, "from_disk": True}, "redrawn": {"redrawn": True}}


class ForkPoint(NamedTuple):
    """A replica and the step at which it is forked.

    `point`: how the step was chosen: 'before 10', '0.88' or 'step 300'. `diverged_at`: the step at which the replica
    diverges in the parent, or None.
    """

    replica: int
    step: int
    point: str
    diverged_at: int | None


def fork_points(fork: config.Fork, losses: np.ndarray) -> list[ForkPoint]:
    """Return the fork points of the replicas of a parent with these losses [steps, S].

    Raises ConfigError if there is nothing to fork, or if `at_step` is after the parent's last step.
    """
    steps, replicas = losses.shape
    ends = [outcome_of(losses[:, replica]) for replica in range(replicas)]
    diverged = [end.diverged_at if end.diverged_at is not None else end.rising_at for end in ends]
    if fork.at_step is not None:
        require(fork.at_step < steps, f"at_step: {fork.at_step} is after the last step of the parent's {steps}")
        return [ForkPoint(r, fork.at_step, f"step {fork.at_step}", diverged[r]) for r in range(replicas)]
    points = [
        ForkPoint(replica, max(0, step), point, at)
        for replica, at in enumerate(diverged)
        if at is not None
        for point, step in (
            (f"before {fork.intervene_before}", at - fork.intervene_before),
            *((f"{fraction:g}", round(fraction * at)) for fraction in fork.fractions),
        )
    ]
    require(
        bool(points), f"parent: none of its {replicas} replicas diverges, so there is nothing to fork; give at_step"
    )
    return points


def changed(parent: config.StudentTeacher, intervention: config.Intervention) -> config.StudentTeacher:
    """Return the parent's config with the intervention's changes.

    Raises ConfigError if the parent's precision changes during the run (a fork has only one), if the targets are the
    parent's already, or if all settings that are given are.
    """
    values, new = plain(parent), {key: value for key, value in plain(intervention).items() if value is not None}
    if len(parent.precision.schedule) > 1:
        raise ConfigError("parent: its precision.schedule has several rows; fork a run that has only one")
    if "plan" in new:
        values["precision"] = plain(parent.precision.with_plan(new["plan"]))
    if "vector_ops" in new:
        values["student"]["norm_ops"] = None
    for key in GROUPS.keys() & new.keys():
        values[GROUPS[key]][key] = new[key]
    targets = TARGETS.get(str(new.get("targets")), {})
    require(
        not targets or targets.items() - values["teacher"].items() != set(),
        f"targets: the parent's are {new.get('targets')} already; set intervention.targets to null",
    )
    values["teacher"] |= targets
    fork = cast(config.StudentTeacher, config.read_run(values))
    given = [key for key in new if key in GROUPS or key == "plan"]
    require(
        fork != parent or not given or intervention.new_optimizer or intervention.perturbed_weight is not None,
        f"intervention: changes nothing, because the parent has the same {', '.join(given)}; change or omit it",
    )
    return fork


def replay(stack: Stack, points: Sequence[ForkPoint], recorded: np.ndarray) -> dict[ForkPoint, ReplicaState]:
    """Train the parent's stack on to each fork point, and return {point: the replica's state there}.

    `recorded` [steps, 2, S]: the parent's journal. Raises ConfigError at the first step whose bits differ from it.
    """
    states: dict[ForkPoint, ReplicaState] = {}
    first, last = int(stack.step), max(point.step for point in points)
    for step in range(first, last + 1):
        for point in points:
            if point.step == step:
                states[point] = state_of(stack, point.replica)
        if step < last:
            stack.train_step()
        if step + 1 - first == ROWS or step == last:
            check_replay(stack, first, step if step == last else step + 1, recorded)
            first = step + 1
    return states


def state_of(stack: Stack, replica: int) -> ReplicaState:
    return {name: tensor[replica].clone() for name, tensor in stack.named_state().items() if name != "step"}


def check_replay(stack: Stack, first: int, stop: int, recorded: np.ndarray) -> None:
    """Raise ConfigError unless steps `first` to `stop` - 1 of the replay have the bits of the parent's journal."""
    replayed = stack.record[[step % ROWS for step in range(first, stop)]].cpu().numpy()
    same = np.all(equal_bits(replayed, recorded[first:stop]), axis=(1, 2))
    require(
        bool(same.all()),
        f"parent: the replay differs from the journal at step {first + leading_true(same)}; fork on the same GPU, "
        "torch and code",
    )


def equal_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return elementwise whether two float32 arrays have equal bits; all NaNs count as equal."""
    return (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))


def leading_true(flags: np.ndarray) -> int:
    """Return the number of true flags before the first false one."""
    return int(np.logical_and.accumulate(flags).sum())


def waves(points: Sequence[ForkPoint], width: int) -> Iterator[list[ForkPoint]]:
    """Yield the points in groups of at most `width`.

    `width` is that of the parent's stack, because a GEMM's bits may depend on it.
    """
    for start in range(0, len(points), width):
        yield list(points[start : start + width])


def forked(
    run: config.StudentTeacher,
    parent: config.StudentTeacher,
    wave: Sequence[ForkPoint],
    states: Sequence[ReplicaState],
    new_optimizer: bool = False,
    perturbed_weight: int | None = None,
) -> Stack:
    """Return a stack of the parent's width that continues from the replicas' states; spare slots repeat the first.

    Its teacher is in the parent's precision. `new_optimizer`: start the optimizer anew for all parameters, as is always
    done for parameters that the parent did not train. `perturbed_weight`: as in `config.Intervention`.
    """
    width = len(parent.replicas)
    slots = [*range(len(wave)), *[0] * (width - len(wave))]
    device = states[0]["alive"].device
    taught_as = cast(config.StudentTeacher, config.read_run(plain(parent) | {"teacher": plain(run.teacher)}))
    stack = Stack(run, device, starts=[wave[slot].step for slot in slots], taught_as=taught_as)
    stack.lrs.copy_(torch.tensor([parent.replicas[wave[slot].replica][1] for slot in slots]))
    with torch.no_grad():
        for name, tensor in stack.named_state().items():
            if name in states[0] and not (new_optimizer and name.startswith("optimizer.")):
                tensor.copy_(torch.stack([states[slot][name] for slot in slots]))
        if perturbed_weight is not None:
            weight_SNK = stack.named_state()[f"model.{PERTURBED}"]
            weight_SNK.view(torch.int32).flatten(1)[:, perturbed_weight] ^= LAST_KEPT_BIT
    trained = [name for name, p in stack.model.named_parameters() if p.requires_grad]
    is_new = [new_optimizer or f"optimizer.{name}.0" not in states[0] for name in trained]
    stack.optimizer.starts = [stack.starts if new else None for new in is_new]
    return stack


def run_on(stack: Stack, steps: int) -> np.ndarray:
    """Train `steps` steps, and return loss and gradient norm of each, [steps, 2, S] float32."""
    parts = []
    for step in range(1, steps + 1):
        stack.train_step()
        if step % ROWS == 0 or step == steps:
            parts.append(stack.record[: (step - 1) % ROWS + 1].cpu().numpy())
    return np.concatenate(parts)
