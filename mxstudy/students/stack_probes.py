"""What a stack's probes measure between two of its steps, as rows of the journal; the training does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from mxstudy import config
from mxstudy.config.model import BLOCKS
from mxstudy.probes.gradient_bias import WHOLE
from mxstudy.reader import plain, require
from mxstudy.students.probes.bias import Rows, gradient_bias
from mxstudy.students.probes.last_bin import last_bin
from mxstudy.students.probes.shadow import gradients, in_fp32
from mxstudy.students.probes.sharpness import Vector, hessian, largest_eigenvalue, preconditioned, stability
from mxstudy.students.stack import LOSSES, Stack


class StackProbes:
    """`twin`: for `gradient_bias.coupled` a stack of `fp32_twin(stack.config)`, which its owner trains in step.

    Raises ConfigError where that is missing.
    """

    def __init__(self, probes: config.StudentProbes, stack: Stack, twin: Stack | None = None) -> None:
        require(
            twin is not None or not probes.gradient_bias.coupled,
            "probe.gradient_bias.coupled: needs a twin in FP32, trained beside the stack",
        )
        self.probes, self.stack, self.twin = probes, stack, twin
        self.loss = LOSSES[stack.config.loss]
        self.eigenvectors: dict[str, Vector] = {}  # where the next measurement goes on

    def measure(self, step: int) -> list[dict[str, Any]]:
        """{"step", "probe", "values"} of each probe that is due, `values` '<place>/<quantity>' to a list [S].

        At the weights before that step and on its batch: to be called before `train_step`.
        """
        due = {
            name
            for name in ("last_bin", "gradient_bias", "sharpness")
            if (every := getattr(self.probes, name).every_steps) and step % every == 0
        }
        if not due:
            return []
        batch = self.stack.batch()
        return [{"step": step, "probe": name, "values": values} for name, values in self.measured(due, step, *batch)]

    def measured(self, due: set[str], step: int, x_STD: Tensor, target_STD: Tensor) -> Iterator[tuple[str, Rows]]:
        model, twin = self.stack.model, self.twin
        if "last_bin" in due:
            yield "last_bin", last_bin(model, x_STD)
        if due & {"gradient_bias", "sharpness"}:
            own = gradients(model.sharing(fused=True), self.loss, x_STD, target_STD)
            bias = gradient_bias(own, gradients(in_fp32(model), self.loss, x_STD, target_STD))
        if "gradient_bias" in due:
            yield "gradient_bias", bias
        if "gradient_bias" in due and self.probes.gradient_bias.coupled:
            assert twin is not None
            yield "coupled_gradient_bias", gradient_bias(own, gradients(twin.model, self.loss, *twin.batch()))
        if "sharpness" in due:
            own = {}  # the Hessian needs the memory
            yield "sharpness", self.sharpness(step, bias[f"{WHOLE}/ratio"], x_STD, target_STD)

    def sharpness(self, step: int, zeta: list[float], x_STD: Tensor, target_STD: Tensor) -> Rows:
        """'hessian/...', and with Adam from its first update on 'preconditioned/...': eigenvalue, residual, stability.

        stability is the left side of Eq. 10 (`mxstudy.students.probes.sharpness`) with the eigenvalue as lambda and, as
        ||zeta||, the lower bound that gradient_bias/model/ratio is at the same weights; both are here, and `lr`.
        """
        lr = (self.stack.lrs * self.stack.lr_ratios[step]).double()
        product = hessian(self.stack.model, self.loss, x_STD, target_STD)
        operators = {"hessian": product}
        diagonal = self.adam_diagonal(step)
        if diagonal is not None:
            operators["preconditioned"] = preconditioned(product, diagonal)
        values = {"lr": lr, "zeta": torch.tensor(zeta, dtype=torch.float64, device=lr.device)}
        for name, operator in operators.items():
            iterations, last = self.probes.sharpness.iterations, self.eigenvectors.get(name)
            found = largest_eigenvalue(operator, self.stack.model, iterations, last)
            self.eigenvectors[name] = found.vector
            values |= {f"{name}/eigenvalue": found.value, f"{name}/residual": found.residual}
            values[f"{name}/stability"] = stability(found.value, lr, values["zeta"])
        return {name: value.tolist() for name, value in values.items()}

    def adam_diagonal(self, step: int) -> list[Tensor] | None:
        """sqrt(v / (1 - beta2^step)) + eps, by which Adam has divided its last update; None without one."""
        optimizer = self.stack.config.optimizer
        if not isinstance(optimizer, config.Adam) or step == 0:
            return None
        unbiased = (1 - optimizer.betas[1] ** step) ** -0.5
        return [v.sqrt() * unbiased + optimizer.eps for _, v in self.stack.optimizer.states]


def fp32_twin(run: config.StudentTeacher) -> config.StudentTeacher:
    """The same run with nothing rounded; seeds, data, norm and a bias that is frozen stay, the teacher is in FP32.

    Noise of its own stays with the run: the twin has that of the runs without.
    """
    values = plain(run)
    values["precision"]["schedule"] = [{"from_step": 0, "plan": {BLOCKS: "fp32"}}]
    values["student"] |= {"gain": "fp32", "vector_ops": "fp32", "norm_ops": None}
    values["teacher"] |= {"quantized": False, "from_disk": False}
    values["own_noise"] = False
    values["train"]["compute"] = "fp32"
    values["probe"] = {}
    return cast(config.StudentTeacher, config.read_run(values))
