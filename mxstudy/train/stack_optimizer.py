"""Adam and SGD for stacks: each replica with a learning rate and a step of its own, as pure functions of tensors.

As in PyTorch's, without weight decay: p -= lr * update; Adam's update is m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxstudy import config

State = tuple[Tensor, ...]


def adam(g: Tensor, state: State, step: Tensor, optimizer: config.Adam) -> tuple[Tensor, State]:
    """`step` counts from 0, int64."""
    (beta1, beta2), t = optimizer.betas, (step + 1).to(torch.float64)
    m, v = state
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    unbiased = ((1 - beta1**t).reciprocal().to(torch.float32), (1 - beta2**t).rsqrt().to(torch.float32))
    return m * unbiased[0] / (v.sqrt() * unbiased[1] + optimizer.eps), (m, v)


def sgd(g: Tensor, state: State, step: Tensor, optimizer: config.SGD) -> tuple[Tensor, State]:
    if not optimizer.momentum:
        return g, ()
    buffer = state[0] * optimizer.momentum + g
    return buffer, (buffer,)


RULES: dict[type, Any] = {config.Adam: adam, config.SGD: sgd}


def state_tensors(optimizer: config.StudentOptimizer) -> int:
    """Of each parameter."""
    return 2 if isinstance(optimizer, config.Adam) else int(optimizer.momentum > 0)


class StackOptimizer:
    """Of parameters [S, ...]. `starts`: of each the steps [S] of the first updates, None for 0."""

    def __init__(self, optimizer: config.StudentOptimizer, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.states = [tuple(torch.zeros_like(p) for _ in range(state_tensors(optimizer))) for p in parameters]
        self.starts: list[Tensor | None] = [None] * len(parameters)
        self.rule = partial(RULES[type(optimizer)], optimizer=optimizer)

    def step(self, gradients: Sequence[Tensor], lrs: Tensor, step: Tensor, alive: Tensor) -> None:
        """`lrs` and `alive` [S], `step` 0-dim or [S]. A replica that is not alive stays as it is."""
        lrs, alive, step = (tensor.reshape(-1, 1, 1) for tensor in (lrs, alive, step))
        for p, g, state, start in zip(self.parameters, gradients, self.states, self.starts, strict=True):
            taken = step if start is None else step - start.reshape(-1, 1, 1)
            change, new = self.rule(g, state, taken)
            p.copy_(torch.where(alive, p - lrs * change, p))
            for old, value in zip(state, new, strict=True):
                old.copy_(torch.where(alive, value, old))

    def state(self) -> list[Tensor]:
        return [tensor for state in self.states for tensor in state]
