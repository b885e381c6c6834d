"""What a probe is, and what it may see."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

Values = dict[str, float | list[float]]
Sequence = tuple[Tensor, Tensor]  # tokens, targets [1, T]


@dataclass(frozen=True)
class StepView:
    """A step as it ended, to be read only: `loss` and `grad_norm` before clipping, gradients still in `model`.

    `first_sequence` hands out the first sequence of the step's batch, on the model's device; `tokens`: of that batch,
    over which the loss is a mean.
    """

    step: int
    loss: float
    grad_norm: float
    model: nn.Module
    first_sequence: Callable[[], Sequence]
    tokens: int

    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Probe(Protocol):
    """On every `every_steps`-th step `watch` is shown each norm's input in the forward, then `measure` is called."""

    name: str
    every_steps: int

    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        """`module` is the NormLinear that reads x [..., size], or a norm on its own; x must not be written."""

    def measure(self, view: StepView) -> Values:
        """What was seen since the last call, by '<norm>/<quantity>'; a row of the journal unless it is empty."""
