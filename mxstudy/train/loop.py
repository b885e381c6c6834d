"""The training loop: a step reads from top to bottom in the order in which it happens.

Each rank runs it on its share of every batch; the recorded values are those of all ranks together. A step does not wait
for the GPU: the device itself skips an update that is not finite. So on a single GPU the host launches the next step
before it reads the loss of this one, unless spikes are watched. Probes that read the model at a step wait for it, after
the step before has been recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from mxstudy import config
from mxstudy.data.batches import Batches, rows_of_rank
from mxstudy.distributed import rank, sum_over_ranks, whole, world_size
from mxstudy.host_copies import to_device, to_host
from mxstudy.model.backends import backends_of
from mxstudy.model.balance import RoutingOfStep, move_biases
from mxstudy.model.decoder import Decoder
from mxstudy.model.describe_precision import describe
from mxstudy.model.dropout import without_dropout
from mxstudy.model.fused_block import recompute_mlps
from mxstudy.model.head import unit_gradient
from mxstudy.model.precision import apply_precision
from mxstudy.model.random_streams import move_to, move_to_row
from mxstudy.probes.base import Later, Probe, StepView, Values, values_of
from mxstudy.probes.memory import GIB
from mxstudy.probes.spike_watch import SpikeWatch
from mxstudy.probes.timing import Timing
from mxstudy.tracking.journal import Row
from mxstudy.train.optimizer import set_learning_rate, step_unless
from mxstudy.train.parallel import drop_gathered
from mxstudy.train.runtime import peak_flops
from mxstudy.train.schedule import lr_ratio
from mxstudy.train.signals import Leave

CADENCES = ("validation", "evaluation", "sample", "checkpoint")  # config sections: what is done between two steps
CORPORA = "corpora"  # in the journal: the samples that a run took from each corpus


class StepRecorder(Protocol):
    """Stores a run's measurements, and the checkpoints from which it can resume."""

    def measuring(self, what: str, done: int, total: int) -> None:
        """Show the progress of a measurement between two steps: `done` of `total`."""

    def record(self, row: Row) -> None:
        """Append a row to the journal."""

    def save(self, step: int) -> None:
        """Write a durable checkpoint of the state before `step`."""


class LaunchedStep(NamedTuple):
    """A step that the GPU works on: its view, and what each probe measured, by the probe's name."""

    view: StepView
    measured: list[tuple[str, Values | Later]]


@dataclass
class TrainingRun:
    """Everything that the training loop works with: config, model, optimizer, batches, recorder, probes."""

    config: config.Pretrain
    model: Decoder
    optimizer: torch.optim.Optimizer
    batches: Batches
    device: torch.device
    recorder: StepRecorder
    probes: list[Probe] = field(default_factory=list)
    spikes: SpikeWatch | None = None
    evaluate: Callable[[], dict[str, float]] | None = None  # returns scores of the current model
    write_texts: Callable[[], list[Row]] | None = None  # returns what the current model writes

    def __post_init__(self) -> None:
        train = self.config.train
        self.tokens_per_step = train.batch_size * train.sequence_length
        self.rows = rows_of_rank(train, rank(), world_size())
        self.micro_batch_size = train.micro_batch_size or len(self.rows)
        self.peak_flops = peak_flops(self.device)  # of one GPU
        self.peak_bytes = 0  # of GPU memory
        self.clocks: list[Timing] = []  # the timing probes of this step
        self.diverged = torch.zeros((), dtype=torch.bool, device=self.device)  # once true, no step is applied
        self.unread: list[LaunchedStep] = []  # not yet recorded
        self.began_s = 0.0  # when the first of them began

    @property
    def ahead(self) -> int:
        """Return how many launched steps may be unread: 1 on a single GPU without a spike watch, else 0."""
        return int(self.device.type == "cuda" and world_size() == 1 and self.spikes is None)

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's micro-batches (tokens, targets) of a step, and move the random streams to each."""
        for start in self.rows[:: self.micro_batch_size]:
            move_to(self.model, step, start * self.config.train.sequence_length)
            yield self.to_device(self.batches.train(step, start, start + self.micro_batch_size))

    def first_sequence(self, step: int) -> tuple[Tensor, Tensor]:
        return self.to_device(self.batches.train(step, 0, 1))

    def mark(self, phase: str) -> None:
        """Tell the timing probes that this phase of the step ends here."""
        for clock in self.clocks:
            clock.mark(phase, self.device)

    def to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens_BT, targets_BT = batch
        return to_device(tokens_BT, self.device), to_device(targets_BT, self.device)


def set_precision(model: Decoder, config: config.Pretrain, step: int, device: torch.device) -> Row:
    """Set casts and backends to those of this step. Return the journal's row: {linear: recipe}, {block: backend}."""
    train = config.train
    rows = apply_precision(
        model,
        config.precision,
        step,
        train.compute,
        device,
        (config.seed,),
        compiled=train.compile,
        sequence_length=train.sequence_length,
    )
    recompute_mlps(model, config.train.recompute_mlp)
    return {"precision": rows, "backends": backends_of(model)}


def train_step(run: TrainingRun, step: int) -> StepView:
    """Do one training step and return its view; once loss or gradient norm is not finite, the weights do not change."""
    run.optimizer.zero_grad(set_to_none=True)
    loss_sum, routed = torch.zeros((), device=run.device), RoutingOfStep(run.model)
    for tokens_BT, targets_BT in run.micro_batches(step):
        run.mark("data")
        part = run.model(tokens_BT, targets_BT, run.tokens_per_step)
        run.mark("forward")
        routed.with_balance_loss(part, tokens_BT.numel() / run.tokens_per_step).backward(unit_gradient(part.device))
        run.mark("backward")
        loss_sum += part.detach()
    loss, routing = sum_over_ranks(loss_sum), routed.over_ranks()
    grad_norm = whole(clip_grad_norm_(run.model.parameters(), run.config.optimizer.max_grad_norm))
    run.mark("clip")
    measured = torch.stack((loss, grad_norm))
    run.diverged |= ~measured.isfinite().all()
    if routing is not None and routing.balance_loss is not None:
        measured = torch.cat((measured, routing.balance_loss.reshape(1)))
    first_sequence = partial(run.first_sequence, step)
    view = StepView(step, to_host(measured), run.model, first_sequence, run.tokens_per_step, routing)
    set_learning_rate(run.optimizer, learning_rate(run.config, step))
    step_unless(run.optimizer, run.diverged)
    move_biases(run.model, routing, run.diverged)
    run.mark("optimizer")
    return view


def learning_rate(config: config.Pretrain, step: int) -> float:
    return config.optimizer.lr * lr_ratio(config.schedule, step, config.train.steps)


def train(run: TrainingRun, start: int, leave: Leave, lacks: Collection[str] = ()) -> str:
    """Train from step `start` to the end, a divergence or a signal. Return finished, diverged or preempted.

    The last checkpoint is saved before the last measurements, so that one that fails does not lose the training.
    `lacks`: those that are still to be made when the run resumes after its last step.
    """
    measure(run, start - 1, lacks)
    settings, starts = run.config, {row.from_step for row in run.config.precision.schedule}
    cadences = {name: getattr(settings, name).every_steps for name in CADENCES}
    for step in range(start, settings.train.steps):
        if step in starts and step > start:
            plan = set_precision(run.model, settings, step, run.device)
            run.recorder.record({"step": step} | plan)
            if rank() == 0:
                print(f"from step {step}\n{describe(run.model, plan['precision'])}", flush=True)
        diverged = begin_step(run, step)
        if diverged is None:
            diverged = record_steps(run, run.ahead)
        signal, is_last = leave.agree(), step + 1 == settings.train.steps
        due = {name for name, every_steps in cadences.items() if is_last or is_due(step + 1, every_steps)}
        if diverged is None and (due or signal or step + 1 in starts):
            diverged = record_steps(run)
        if diverged is not None or is_last:
            last = step if diverged is None else diverged
            run.recorder.record({"step": last, "probe": CORPORA, "values": run.batches.taken(last + 1)})
        if diverged is not None:
            run.recorder.save(diverged)
            return "diverged"
        if is_last:
            run.recorder.save(step + 1)
        measure(run, step, due)
        if not is_last and (signal or "checkpoint" in due):
            run.recorder.save(step + 1)
        if signal and not is_last:
            return "preempted"
    return "finished"


def measure(run: TrainingRun, step: int, names: Collection[str]) -> None:
    """Record what these config sections measure after a step: validation, evaluation, and sample, the model's texts."""
    if "validation" in names:
        run.recorder.record({"step": step, "validation_loss": validate(run)})
    if run.evaluate and "evaluation" in names and (scores := run.evaluate()):
        run.recorder.record({"step": step, "probe": "evaluation", "values": scores})
    if run.write_texts and "sample" in names:
        run.recorder.record({"step": step, "texts": run.write_texts()})


def not_measured(rows: Iterable[Row], step: int) -> set[str]:
    """Return the config sections of which a journal's rows have no measurement after a step."""
    own = [row for row in rows if row["step"] == step]
    has = {
        "validation": any("validation_loss" in row for row in own),
        "evaluation": any(row.get("probe") == "evaluation" for row in own),
        "sample": any("texts" in row for row in own),
    }
    return {name for name, is_there in has.items() if not is_there}


def is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def begin_step(run: TrainingRun, step: int) -> int | None:
    """Launch the step, record those before it while the GPU works on it, and let the probes that are due measure it.

    Return the step that diverged if an earlier one did; the new step is then not recorded. Else return None.
    """
    if not run.unread:
        run.began_s = time.perf_counter()
    due = [probe for probe in run.probes if is_due(step, probe.every_steps)]
    view = watched_step(run, step, due)
    diverged = record_steps(run)
    if diverged is None:
        if due:
            move_to_row(run.model, 0)  # probes that run the model again run it on the first sequence
        run.unread.append(LaunchedStep(view, [(probe.name, probe.measure(view)) for probe in due]))
    return diverged


def record_steps(run: TrainingRun, most: int = 0) -> int | None:
    """Record launched steps and their spikes, in order, until at most `most` are unread. Return one that diverged."""
    while len(run.unread) > most:
        view, measured = run.unread.pop(0)
        view.is_finite()  # waits for the GPU
        began_s, run.began_s = run.began_s, time.perf_counter()
        for name, found in measured:
            if values := values_of(found):
                run.recorder.record({"step": view.step, "probe": name, "values": values})
        run.recorder.record(step_row(run, view, run.began_s - began_s))
        if run.spikes and (row := run.spikes.look(view)):
            run.recorder.record(row)
        if not view.is_finite():
            return view.step
    return None


def watched_step(run: TrainingRun, step: int, due: Sequence[Probe]) -> StepView:
    """Launch the step while these probes watch it, and return its view."""
    run.model.watchers = tuple(probe.watch for probe in due)
    run.clocks = [probe for probe in due if isinstance(probe, Timing)]
    run.mark("begin")
    view = train_step(run, step)
    run.model.watchers, run.clocks = (), []
    if run.device.type == "cuda":  # read the peak now: the memory probe resets it
        run.peak_bytes = max(run.peak_bytes, torch.cuda.max_memory_allocated(run.device))
    return view


def step_row(run: TrainingRun, view: StepView, seconds: float) -> Row:
    """Return the journal's row of a step that took this many seconds."""
    tokens_per_s = run.tokens_per_step / seconds
    row = {
        "step": view.step,
        "tokens": (view.step + 1) * run.tokens_per_step,
        "loss": view.loss,
        "lr": learning_rate(run.config, view.step),
        "grad_norm": view.grad_norm,
        "tokens_per_s": tokens_per_s,
    }
    if view.balance_loss is not None:
        row["balance_loss"] = view.balance_loss
    if run.device.type == "cuda":
        row["memory_gib"] = run.peak_bytes / GIB
    if run.peak_flops is not None:
        flops_per_token = run.model.flops_per_token(run.config.train.sequence_length)
        row["mfu"] = flops_per_token * tokens_per_s / (run.peak_flops * world_size())
    return row


@torch.no_grad()
def validate(run: TrainingRun) -> float:
    """Return the mean cross-entropy, in nats per token, over the fixed validation windows; ranks share them in turns.

    No rank can run a sharded model alone. In the last turn, ranks without a micro-batch of their own run the first one
    and discard its loss.
    """
    tokens_BT, targets_BT = run.batches.validation(run.config.validation.sequences)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    parts = torch.arange(len(tokens_BT)).split(run.micro_batch_size)
    for turn in range(0, len(parts), world_size()):
        run.recorder.measuring("validation", turn, len(parts))
        own = turn + rank()
        rows = parts[own if own < len(parts) else 0]
        move_to_row(run.model, int(rows[0]) * tokens_BT.shape[1])
        tokens, targets = run.to_device((tokens_BT[rows], targets_BT[rows]))
        with without_dropout(run.model):
            loss = run.model(tokens, targets)
        if own < len(parts):
            total += loss
    drop_gathered(run.model)
    return (sum_over_ranks(total) / targets_BT.numel()).item()
