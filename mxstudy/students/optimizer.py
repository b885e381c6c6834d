"""Adam and SGD for stacks, as pure functions of tensors; each replica has its own learning rate and step.

As in PyTorch, without weight decay: p -= lr * update; Adam's update is m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy import config
from mxstudy.blocks.norm_mlp import recast
from mxstudy.kernels import adam_
from mxstudy.kernels.operators import Held
from mxstudy.kernels.streams import join_side_stream, side_stream
from mxstudy.numerics.grid import to_dtype

Moments = tuple[Tensor, ...]


def adam(g: Tensor, state: Moments, step: Tensor, optimizer: config.Adam) -> tuple[Tensor, Moments]:
    """Return Adam's update and the new state (m, v); `step` is int64 and counts from 0."""
    m, v = state
    m = m + (g - m) * (1 - optimizer.betas[0])
    v = v * optimizer.betas[1] + g * g * (1 - optimizer.betas[1])
    unbias_m, unbias_v = unbias(step, optimizer.betas)
    return m * unbias_m / (v.sqrt() * unbias_v + optimizer.eps), (m, v)


def unbias(step: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return the factors, float32, that correct m and sqrt(v) for their start at zero; `step` counts from 0."""
    t = (step + 1).to(torch.float64)
    return (1 - betas[0] ** t).reciprocal().to(torch.float32), (1 - betas[1] ** t).rsqrt().to(torch.float32)


def sgd(g: Tensor, state: Moments, step: Tensor, optimizer: config.SGD) -> tuple[Tensor, Moments]:
    """Return SGD's update and the new state: the momentum buffer, or nothing without momentum."""
    if not optimizer.momentum:
        return g, ()
    buffer = state[0] * optimizer.momentum + g
    return buffer, (buffer,)


class Rule(NamedTuple):
    """How a config's optimizer updates a parameter.

    `update`: gradient, state, step and config to update and new state. `moments`: the number of tensors of the state.
    `has_kernel`: whether `StackOptimizer.kernel_step` does the same on a GPU.
    """

    update: Callable[..., tuple[Tensor, Moments]]
    moments: Callable[[Any], int]
    has_kernel: bool


RULES: dict[type, Rule] = {
    config.Adam: Rule(adam, moments=lambda optimizer: 2, has_kernel=True),
    config.SGD: Rule(sgd, moments=lambda optimizer: int(optimizer.momentum > 0), has_kernel=False),
}


def is_vector(p: Tensor) -> bool:
    """Return whether a stacked parameter [S, rows, n] is a vector per replica: rows is 1."""
    return p.shape[-2] == 1


class StackOptimizer:
    """The optimizer of a stack's parameters [S, ...].

    For each parameter, `starts` has the steps [S] of its first updates, or None for 0, and `held` its cast operands or
    None. On a GPU, Adam is a kernel: the compiled formula is slower for stacks of a few replicas.
    """

    def __init__(
        self, optimizer: config.StudentOptimizer, parameters: Sequence[Tensor], compiled: Callable[[Any], Any]
    ) -> None:
        self.config, self.parameters, rule = optimizer, parameters, RULES[type(optimizer)]
        self.states = [tuple(torch.zeros_like(p) for _ in range(rule.moments(optimizer))) for p in parameters]
        self.starts: list[Tensor | None] = [None] * len(parameters)
        self.held: list[Held | None] = [None] * len(parameters)
        self.rule = partial(rule.update, optimizer=optimizer)
        self.unbias, self.plain_step = compiled(unbias), compiled(self._plain_step)
        self.step = self.kernel_step if rule.has_kernel and parameters[0].is_cuda else self.cast_step

    def kernel_step(self, gradients: Sequence[Tensor], lrs: Tensor, step: Tensor, alive: Tensor) -> None:
        """Update the parameters by Adam's kernel; `lrs` and `alive` are [S], `step` is 0-dim or [S].

        A replica that is not alive stays unchanged.
        """
        assert isinstance(self.config, config.Adam)
        betas, eps, device = self.config.betas, self.config.eps, self.parameters[0].device
        unbiased = self.unbias(step.view(-1), betas)
        corrections = [unbiased if start is None else self.unbias(step - start, betas) for start in self.starts]
        each = list(zip(self.parameters, gradients, self.states, corrections, self.held, strict=True))

        def update(vectors: bool) -> None:
            for p, g, (m, v), own, held in each:
                if is_vector(p) == vectors:
                    adam_(p, g, (m, v), lrs, own, alive, betas, eps, held)

        with torch.no_grad():
            with side_stream(device):  # many launches with very little work each
                update(vectors=True)
            update(vectors=False)
            join_side_stream(device)

    def cast_step(self, gradients: Sequence[Tensor], lrs: Tensor, step: Tensor, alive: Tensor) -> None:
        """Update the parameters by the formula, then cast the held operands; arguments as in `kernel_step`."""
        self.plain_step(gradients, lrs, step, alive)
        self.recast()

    def recast(self) -> None:
        """Cast the held operands from the current parameters."""
        for p, held in zip(self.parameters, self.held, strict=True):
            if held is not None:
                recast(p, held)

    @torch.no_grad()
    def _plain_step(self, gradients: Sequence[Tensor], lrs: Tensor, step: Tensor, alive: Tensor) -> None:
        lrs, alive, step = (tensor.reshape(-1, 1, 1) for tensor in (lrs, alive, step))
        for p, g, state, start in zip(self.parameters, gradients, self.states, self.starts, strict=True):
            own_step = step if start is None else step - start.reshape(-1, 1, 1)
            change, new = self.rule(to_dtype(g, torch.float32), state, own_step)
            p.copy_(torch.where(alive, p - lrs * change, p))
            for old, value in zip(state, new, strict=True):
                old.copy_(torch.where(alive, value, old))

    def state(self) -> list[Tensor]:
        return [tensor for state in self.states for tensor in state]
