"""Run a stack's probes between two of its steps and return rows of the journal, without affecting the training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from mxstudy import config
from mxstudy.config.precision_plan import BLOCKS
from mxstudy.model.random_streams import move_to
from mxstudy.probes.gradient_bias import WHOLE
from mxstudy.reader import plain, require
from mxstudy.students.probes.bias import PerReplica, gradient_bias
from mxstudy.students.probes.last_bin import last_bin
from mxstudy.students.probes.shadow import gradients, in_fp32, trainable
from mxstudy.students.probes.sharpness import Vector, hessian, largest_eigenvalue, preconditioned, stability
from mxstudy.students.stack import LOSSES, Stack
from mxstudy.train.loop import is_due


class StackProbes:
    """The probes of a stack.

    `twin`: for `gradient_bias.coupled`, a stack of `fp32_twin(stack.config)` that the caller trains in step with
    `stack`. Raises ConfigError if it is missing.
    """

    def __init__(self, probes: config.StudentProbes, stack: Stack, twin: Stack | None = None) -> None:
        require(
            twin is not None or not probes.gradient_bias.coupled,
            "probe.gradient_bias.coupled: needs a twin in FP32, trained beside the stack",
        )
        self.probes, self.stack, self.twin = probes, stack, twin
        self.loss = LOSSES[stack.config.loss]
        operators = ("hessian", "preconditioned") if isinstance(stack.config.optimizer, config.Adam) else ("hessian",)
        self.eigenvectors: dict[str, Vector] = {  # the next measurement starts from them; NaN: from random numbers
            operator: [torch.full_like(parameter, torch.nan) for parameter in stack.parameters]
            for operator in (operators if probes.sharpness.every_steps else ())
        }

    def named_state(self) -> dict[str, Tensor]:
        """Return {name: tensor} of what a checkpoint needs so that the next measurements have the same bits."""
        return {
            f"sharpness.{operator}.{name}": part
            for operator, vector in self.eigenvectors.items()
            for name, part in zip(trainable(self.stack.model), vector, strict=True)
        }

    def measure(self, step: int) -> list[dict[str, Any]]:
        """Return a row {"step", "probe", "values"} per due probe; `values` is {'<tensor>/<quantity>': S numbers}.

        Call it before `train_step`: probes use the weights before that step, and its batch.
        """
        due = {name for name, probe in vars(self.probes).items() if is_due(step, probe.every_steps)}
        if not due:
            return []
        move_to(self.stack.model, self.stack.starts + self.stack.step, 0)  # to the random bits of the coming step
        batch = self.stack.batch()
        return [{"step": step, "probe": name, "values": values} for name, values in self.measured(due, step, *batch)]

    def measured(self, due: set[str], step: int, x_STD: Tensor, target_STD: Tensor) -> Iterator[tuple[str, PerReplica]]:
        """Yield the name and the values of every due probe."""
        model, twin = self.stack.model, self.twin
        if "last_bin" in due:
            yield "last_bin", last_bin(model, x_STD)
        if not due & {"gradient_bias", "sharpness"}:
            return
        own = gradients(model.sharing(fused=True), self.loss, x_STD, target_STD)
        bias = gradient_bias(own, gradients(in_fp32(model), self.loss, x_STD, target_STD))
        if "gradient_bias" in due:
            yield "gradient_bias", bias
            if self.probes.gradient_bias.coupled:
                assert twin is not None
                yield "coupled_gradient_bias", gradient_bias(own, gradients(twin.model, self.loss, *twin.batch()))
        if "sharpness" in due:
            own = {}  # free the gradients: the Hessian needs the memory
            yield "sharpness", self.sharpness(step, bias[f"{WHOLE}/ratio"], x_STD, target_STD)

    def sharpness(self, step: int, zeta: list[float], x_STD: Tensor, target_STD: Tensor) -> PerReplica:
        """Return eigenvalue, residual and stability as 'hessian/...', and 'preconditioned/...' after an Adam update.

        stability is the left side of Eq. 10 (`mxstudy.students.probes.sharpness`) with the eigenvalue as lambda and, as
        ||zeta||, its lower bound gradient_bias/model/ratio at the same weights. `lr` and `zeta` are returned too.
        """
        lr = (self.stack.lrs * self.stack.lr_ratios[step]).double()
        product = hessian(self.stack.model, self.loss, x_STD, target_STD)
        operators = {"hessian": product}
        diagonal = self.adam_diagonal(step)
        if diagonal is not None:
            operators["preconditioned"] = preconditioned(product, diagonal)
        values = {"lr": lr, "zeta": torch.tensor(zeta, dtype=torch.float64, device=lr.device)}
        for name, operator in operators.items():
            iterations, last = self.probes.sharpness.iterations, self.eigenvectors[name]
            pair = largest_eigenvalue(operator, self.stack.model, iterations, last)
            self.eigenvectors[name] = pair.vector
            values |= {f"{name}/eigenvalue": pair.value, f"{name}/residual": pair.residual}
            values[f"{name}/stability"] = stability(pair.value, lr, values["zeta"])
        return {name: value.tolist() for name, value in values.items()}

    def adam_diagonal(self, step: int) -> list[Tensor] | None:
        """Return sqrt(v / (1 - beta2^step)) + eps, the divisor of Adam's last update, or None if there was none."""
        optimizer = self.stack.config.optimizer
        if not isinstance(optimizer, config.Adam) or step == 0:
            return None
        unbiased = (1 - optimizer.betas[1] ** step) ** -0.5
        return [v.sqrt() * unbiased + optimizer.eps for _, v in self.stack.optimizer.states]


def fp32_twin(run: config.StudentTeacher) -> config.StudentTeacher:
    """Return the config of the same run in FP32, its teacher included; seeds, data, norm and a frozen bias stay.

    `own_noise` is off: the twin has the label noise of runs without it.
    """
    values = plain(run)
    values["precision"] = plain(run.precision.with_plan({BLOCKS: "fp32"}))
    values["student"] |= {"gain": "fp32", "vector_ops": "fp32", "norm_ops": None}
    values["teacher"] |= {"quantized": False, "from_disk": False}
    values["own_noise"] = False
    values["train"]["compute"] = "fp32"
    values["probe"] = {}
    return cast(config.StudentTeacher, config.read_run(values))
