"""Replicas of a student, trained side by side: every step of all of them at once, on a GPU as one CUDA graph.

Nothing crosses between replicas: losses, gradients, norms and updates have a leading [S]. What varies over a stack is
data: initial weights, learning rates, and the step at which a replica is.
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
    """[S]."""
    return (y_STD - target_STD).square().mean(-1).mean(-1)  # two steps: the order of one may depend on the width S


def kl(y_STD: Tensor, target_STD: Tensor) -> Tensor:
    """KL(softmax of the target || softmax of y), mean over the samples: [S], nats."""
    log_q, log_p = F.log_softmax(y_STD, -1), F.log_softmax(target_STD, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": mse, "kl": kl}


def build_student(run: config.StudentTeacher) -> ResidualMLP:
    """A stack of as many replicas as the run has, not initialised."""
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
    """How the run's teacher is, None if it is not."""
    return TeacherRounding(run.precision.settings, DTYPES[run.train.compute]) if run.teacher.quantized else None


def apply_run_precision(
    model: ResidualMLP, run: config.StudentTeacher, step: int, device: torch.device
) -> dict[str, str]:
    """Set the student's casts, and where they draw; its teacher's draw by the data seed."""
    seeds = [seed for seed, _ in run.replicas]
    return apply_precision(model, run.precision, step, run.train.compute, device, seeds)


class Stack:
    """Students, teacher, optimizer and how many steps they have taken; `train_step` moves all of them on by one.

    `starts`: of each replica the step of the run that its first one here is; all 0 if not given. `taught_as`: the run
    whose teacher this is, where that is another. `losses` and `grad_norms` [S] are those of the last step, of the
    weights before it. A replica of which one is not finite is not `alive` any more: it keeps its weights, and both are
    NaN from the next step on. `record` [ROWS, 2, S] has them of the last steps, step t in row t % ROWS.
    """

    def __init__(
        self,
        run: config.StudentTeacher,
        device: torch.device,
        starts: Sequence[int] = (),
        taught_as: config.StudentTeacher | None = None,
    ) -> None:
        self.config, self.device = run, device
        self.model = build_student(run).to(device)
        self.model.init_weights([seed for seed, _ in run.replicas])
        self.taught_as = by = taught_as or run
        self.teacher = build_teacher(by.teacher.kind, by.model, by.data_seed, quantized(by), by.teacher.redrawn)
        self.teacher.to(device)
        self.starts = torch.tensor(starts or 0, dtype=torch.int64, device=device)
        self.parameters: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self.leaves = self.parameters  # of the gradients
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
        """As the schedule has it at `step`; {linear: row of PRECISIONS}."""
        self.graph = None
        if self.taught_as.teacher.quantized:
            by = self.taught_as
            apply_precision(self.teacher.mlp, by.precision, step, by.train.compute, self.device, (by.data_seed,))
        rows = apply_run_precision(self.model, self.config, step, self.device)
        if self.device.type == "cuda":
            self.use_kernels()
        return rows

    def use_kernels(self) -> None:
        """Where there are some; what stands for a weight then is the operand that the optimizer has cast."""
        if self.config.precision.backend != "reference":
            self.teacher.mlp.join()
        held = self.model.hold()
        self.optimizer.held = [held.get(p) for p in self.parameters]
        self.leaves = [held[p].forward if p in held else p for p in self.parameters]

    def train_step(self) -> None:
        if self.device.type == "cuda":
            self.graph = self.graph or self.capture()
            self.graph.replay()
        else:
            self.eager_step()

    def eager_step(self) -> None:
        each = self.steps()
        move_to(self.model, self.starts + self.step, 0)
        inputs_TD = [self.draw(step) for step in each]
        with side_stream(self.device):  # alone, a small stack leaves most of a GPU idle
            target_STD = self.targets(each, inputs_TD)
        y_STD = self.forward(self.spread(inputs_TD))
        join_side_stream(self.device)
        losses = self.loss(y_STD, target_STD)
        gradients = torch.autograd.grad(losses.sum(), self.leaves)
        lrs, steps = self.judge(losses.detach(), gradients)
        self.optimizer.step(gradients, lrs, steps, self.alive)
        self.step.add_(1)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the next step, [S, T, D] each."""
        steps = self.steps()
        inputs_TD = [self.draw(step) for step in steps]
        return self.spread(inputs_TD), self.targets(steps, inputs_TD)

    def targets(self, steps: Sequence[Tensor], inputs_TD: Sequence[Tensor]) -> Tensor:
        """[S, T, D]."""
        return self.spread([self.teach(*pair) for pair in zip(steps, inputs_TD, strict=True)])

    def steps(self) -> Sequence[Tensor]:
        """The one at which all replicas are, or that of each."""
        steps = self.starts + self.step
        return steps.unbind() if steps.ndim else (steps,)

    def spread(self, parts_TD: Sequence[Tensor]) -> Tensor:
        """[S, T, D] of what all replicas share, or each has: one layout, so that both run the same code."""
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
        """Learning rates [S] and steps of the update; who lives to have one, and the step's record."""
        grad_norms = sum(g.float().square().sum(-1).sum(-1) for g in gradients).sqrt()  # type: ignore[union-attr]
        losses, grad_norms = (torch.where(self.alive, value, torch.nan) for value in (losses, grad_norms))
        self.alive.logical_and_(losses.isfinite() & grad_norms.isfinite())
        self.losses.copy_(losses)
        self.grad_norms.copy_(grad_norms)
        self.record.index_copy_(0, (self.step % ROWS).view(1), torch.stack((losses, grad_norms))[None])
        steps = self.starts + self.step
        at = steps.clamp_max(len(self.lr_ratios) - 1).view(-1)
        return self.lrs * self.lr_ratios.index_select(0, at), steps  # a 0-dim index would be read by the host

    def capture(self) -> torch.cuda.CUDAGraph:
        """The step as a graph; what the warm-up trains is undone."""
        state = [tensor.detach().clone() for tensor in self.state()]  # autograd remembers where it met a parameter
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
        """Everything that a step changes but its own report."""
        return [self.step, self.alive, *self.model.parameters(), *self.optimizer.state()]

    def named_state(self) -> dict[str, Tensor]:
        """`state` by name, as a checkpoint has it."""
        trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
        named = {"step": self.step, "alive": self.alive} | {
            f"model.{name}": p.detach() for name, p in self.model.named_parameters()
        }
        for name, state in zip(trained, self.optimizer.states, strict=True):
            named |= {f"optimizer.{name}.{number}": tensor for number, tensor in enumerate(state)}
        return named
