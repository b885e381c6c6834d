"""Train replicas of a student side by side: one step of all of them at once, on a GPU as one CUDA graph.

Replicas do not influence each other: losses, gradients, norms and updates have a leading [S]. Only data varies over a
stack: initial weights, learning rates, and each replica's current step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxstudy import config
from mxstudy.kernels.streams import join_side_stream, side_stream
from mxstudy.model.precision import DTYPES, apply_precision
from mxstudy.model.random_streams import move_to
from mxstudy.students.inputs import label_noise, student_inputs
from mxstudy.students.model import ResidualMLP
from mxstudy.students.optimizer import StackOptimizer
from mxstudy.students.replicas import stack
from mxstudy.students.teacher import TeacherRounding, build_teacher
from mxstudy.tracking.columnar_journal import ROWS
from mxstudy.train.schedule import lr_ratio

WARM_UP_STEPS = 3  # before a capture: compilation, cuBLAS handles


def mse(y_STD: Tensor, target_STD: Tensor) -> Tensor:
    """Return the mean squared error of each replica: [S]."""
    return (y_STD - target_STD).square().mean(-1).mean(-1)  # two means: one's summation order may depend on S


def kl(y_STD: Tensor, target_STD: Tensor) -> Tensor:
    """Return KL(softmax(target) || softmax(y)) in nats, the mean over the samples of each replica: [S]."""
    log_q, log_p = F.log_softmax(y_STD, -1), F.log_softmax(target_STD, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": mse, "kl": kl}


def build_student(run: config.StudentTeacher) -> ResidualMLP:
    """Return an uninitialised stack of the run's replicas."""
    student = run.student
    model = ResidualMLP(
        run.model,
        run.norm,
        run.precision.settings,
        DTYPES[run.train.compute],
        gain=student.gain,
        vector_ops=student.vector_ops,
        norm_ops=student.norm_ops,
        freeze_norm_bias=student.freeze_norm_bias,
    )
    stack(model, len(run.replicas))
    return model


def quantized(run: config.StudentTeacher) -> TeacherRounding | None:
    """Return the rounding of the run's teacher, or None if it is not quantised."""
    return TeacherRounding(run.precision.settings, DTYPES[run.train.compute]) if run.teacher.quantized else None


def apply_run_precision(
    model: ResidualMLP, run: config.StudentTeacher, step: int, device: torch.device
) -> dict[str, str]:
    """Set the students' casts and random streams to the schedule's at `step`, and return {linear: recipe}.

    The streams are seeded by the replicas' seeds, the teacher's by the data seed.
    """
    seeds = [seed for seed, _ in run.replicas]
    return apply_precision(model, run.precision, step, run.train.compute, device, seeds)


class Stack:
    """Students, teacher, optimizer and their step count; `train_step` trains all of them by one step.

    `starts`: the step of the run at which each replica begins, by default 0. `taught_as`: the run whose teacher is
    used, by default this one. `losses` and `grad_norms` [S] are those of the last step, at the weights before it. A
    replica with a loss or gradient norm that is not finite is no longer `alive`: it keeps its weights, and both values
    are NaN from the next step on. `record` [ROWS, 2, S] holds both for the last steps, step t in row t % ROWS.
    """

    def __init__(
        self,
        run: config.StudentTeacher,
        device: torch.device,
        starts: Sequence[int] = (),
        taught_as: config.StudentTeacher | None = None,
    ) -> None:
        self.config, self.device = run, device
        with torch.device("meta"):
            model = build_student(run)
        self.model = model.to_empty(device=device)
        self.model.init_weights([seed for seed, _ in run.replicas])
        self.taught_as = by = taught_as or run
        self.teacher = build_teacher(by.teacher.kind, by.model, by.data_seed, quantized(by), by.teacher.redrawn)
        self.teacher.to(device)
        self.starts = torch.tensor(starts or 0, dtype=torch.int64, device=device)
        self.parameters: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self.leaves = self.parameters  # the tensors to differentiate by
        as_configured: Callable[[Any], Any] = torch.compile if run.train.compile else lambda function: function
        self.optimizer = StackOptimizer(run.optimizer, self.parameters, as_configured)
        ratios = [lr_ratio(run.schedule, step, run.train.steps) for step in range(run.train.steps)]
        self.lr_ratios = torch.tensor(ratios, dtype=torch.float32, device=device)
        self.lrs = torch.tensor([lr for _, lr in run.replicas], dtype=torch.float32, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.losses, self.grad_norms = torch.zeros_like(self.lrs), torch.zeros_like(self.lrs)
        self.alive = torch.ones_like(self.lrs, dtype=torch.bool)
        self.record = torch.zeros(ROWS, 2, len(self.lrs), device=device)
        self.draw, self.teach, self.forward = map(as_configured, (self._draw, self._teach, self.model.forward))
        self.loss, self.judge = map(as_configured, (LOSSES[run.loss], self._judge))
        self.graph: torch.cuda.CUDAGraph | None = None
        self.set_precision(0)

    def set_precision(self, step: int) -> dict[str, str]:
        """Set students and teacher to the schedule's precision at `step`. Return {linear: recipe} of the students."""
        self.graph = None
        if self.taught_as.teacher.quantized:
            by = self.taught_as
            apply_precision(self.teacher.mlp, by.precision, step, by.train.compute, self.device, (by.data_seed,))
        rows = apply_run_precision(self.model, self.config, step, self.device)
        if self.device.type == "cuda":
            self.use_kernels()
        return rows

    def use_kernels(self) -> None:
        """Switch to kernels where they exist. Gradients are then taken by held operands instead of their weights."""
        if self.config.precision.backend != "reference":
            self.teacher.mlp.use_kernels()
        held = self.model.hold()
        self.optimizer.held = [held.get(p) for p in self.parameters]
        self.leaves = [held[p].forward if p in held else p for p in self.parameters]

    def train_step(self) -> None:
        """Train one step: by replaying the CUDA graph on a GPU, else eagerly."""
        if self.device.type == "cuda":
            self.graph = self.graph or self.capture()
            self.graph.replay()
        else:
            self.eager_step()

    def eager_step(self) -> None:
        each = self.steps()
        move_to(self.model, self.starts + self.step, 0)
        inputs_TD = [self.draw(step) for step in each]
        with side_stream(self.device):  # in parallel, because a small stack leaves most of a GPU idle
            target_STD = self.targets(each, inputs_TD)
        y_STD = self.forward(self.for_replicas(inputs_TD))
        join_side_stream(self.device)
        losses = self.loss(y_STD, target_STD)
        gradients = torch.autograd.grad(losses.sum(), self.leaves)
        lrs, steps = self.judge(losses.detach(), gradients)
        self.optimizer.step(gradients, lrs, steps, self.alive)
        self.step.add_(1)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the next step, [S, T, D] each."""
        steps = self.steps()
        inputs_TD = [self.draw(step) for step in steps]
        return self.for_replicas(inputs_TD), self.targets(steps, inputs_TD)

    def targets(self, steps: Sequence[Tensor], inputs_TD: Sequence[Tensor]) -> Tensor:
        """Return the targets, label noise included: [S, T, D]."""
        return self.for_replicas([self.teach(*pair) for pair in zip(steps, inputs_TD, strict=True)])

    def steps(self) -> Sequence[Tensor]:
        """Return the one step at which all replicas are, or the step of each replica: int64 0-dim tensors."""
        steps = self.starts + self.step
        return steps.unbind() if steps.ndim else (steps,)

    def for_replicas(self, parts_TD: Sequence[Tensor]) -> Tensor:
        """Return [S, T, D] from one tensor [T, D] for all replicas, or one for each; the memory layout is the same."""
        if len(parts_TD) > 1:
            return torch.stack(list(parts_TD))
        return parts_TD[0].expand(len(self.lrs), *parts_TD[0].shape).contiguous()

    def _draw(self, step: Tensor) -> Tensor:
        size = self.config.train.batch_size, self.config.model.hidden_size
        return student_inputs(self.config.data_seed, step, *size, self.device)

    def _teach(self, step: Tensor, x_TD: Tensor) -> Tensor:
        run, (size, features), target_TD = self.config, x_TD.shape, self.teacher(x_TD)
        for stream in run.noise_streams:
            noise_TD = label_noise(run.data_seed, step, size, features, self.device, run.label_noise, stream)
            target_TD = target_TD + noise_TD
        return target_TD

    @torch.no_grad()
    def _judge(self, losses: Tensor, gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Update `alive`, `losses`, `grad_norms` and `record`. Return learning rates [S] and steps of the update."""
        grad_norms = sum(g.float().square().sum(-1).sum(-1) for g in gradients).sqrt()  # type: ignore[union-attr]
        losses, grad_norms = (torch.where(self.alive, value, torch.nan) for value in (losses, grad_norms))
        self.alive.logical_and_(losses.isfinite() & grad_norms.isfinite())
        self.losses.copy_(losses)
        self.grad_norms.copy_(grad_norms)
        self.record.index_copy_(0, (self.step % ROWS).view(1), torch.stack((losses, grad_norms))[None])
        steps = self.starts + self.step
        at = steps.clamp_max(len(self.lr_ratios) - 1).view(-1)
        return self.lrs * self.lr_ratios.index_select(0, at), steps  # a 0-dim index would be copied to the host

    def capture(self) -> torch.cuda.CUDAGraph:
        """Capture and return the step as a CUDA graph; the warm-up's changes of the state are undone."""
        # detached: autograd remembers a parameter's stream
        state = [tensor.detach().clone() for tensor in self.state()]
        self.optimizer.recast()  # weights may have been loaded
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self.eager_step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.eager_step()
        with torch.no_grad():
            for tensor, before in zip(self.state(), state, strict=True):
                tensor.copy_(before)
        self.optimizer.recast()
        return graph

    def state(self) -> list[Tensor]:
        """Return every tensor that a step changes, except losses, gradient norms and their record."""
        return [self.step, self.alive, *self.model.parameters(), *self.optimizer.state()]

    def named_state(self) -> dict[str, Tensor]:
        """Return `state` by name, as in a checkpoint."""
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        named = {"step": self.step, "alive": self.alive} | {
            f"model.{name}": p.detach() for name, p in self.model.named_parameters()
        }
        for name, state in zip(trained, self.optimizer.states, strict=True):
            named |= {f"optimizer.{name}.{number}": tensor for number, tensor in enumerate(state)}
        return named
