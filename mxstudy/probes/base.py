"""The interface of a probe, and the view of a step that it gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor, nn

from mxstudy.config.observation import Scheduled
from mxstudy.model.balance import StepRouting

Values = dict[str, float | list[float]]
Later = Callable[[], Values]  # waits for the GPU and returns the values
TrainingSequence = tuple[Tensor, Tensor]  # tokens, targets [1, T]


def values_of(measured: Values | Later) -> Values:
    """Return what a probe measured; waits for it if it is still on its way."""
    return measured() if callable(measured) else measured


@dataclass(frozen=True)
class StepView:
    """A read-only view of a step: `loss`, `grad_norm` before clipping, and `model` with its gradients.

    `read` waits for these numbers and returns them on CPU: [2], or [3] with a mixture's auxiliary loss.
    `first_sequence` returns the first sequence of the step's batch, on the model's device. `tokens`: number of tokens
    of that batch, over which the loss is a mean. `routing`: what the routers did; None in a dense model.
    """

    step: int
    read: Callable[[], Tensor]
    model: nn.Module
    first_sequence: Callable[[], TrainingSequence]
    tokens: int
    routing: StepRouting | None = None

    @cached_property
    def numbers(self) -> list[float]:
        return self.read().tolist()

    @property
    def loss(self) -> float:
        return self.numbers[0]

    @property
    def grad_norm(self) -> float:
        return self.numbers[1]

    @property
    def balance_loss(self) -> float | None:
        return self.numbers[2] if len(self.numbers) > 2 else None

    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Probe(Protocol):
    """A probe: in every `every_steps`-th step, `watch` gets each norm's input in the forward, then `measure` runs."""

    name: str
    every_steps: int

    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        """See x [..., size], the input of `module`, a NormLinear or a norm without a linear; x must not be modified."""

    def measure(self, view: StepView) -> Values | Later:
        """Return the values since the last call, by '<norm>/<quantity>'; they become a row of the journal if any.

        A probe that can wait later returns a function that waits for the GPU and returns the values: the host calls it
        once it has launched the next step.
        """


class ScheduledProbe:
    """A base of probes: it has the schedule of its settings, and ignores activations unless `watch` is overridden."""

    def __init__(self, settings: Scheduled) -> None:
        self.every_steps = settings.every_steps

    def watch(self, name: str, module: nn.Module, x: Tensor) -> None:
        """Do nothing: `measure` does not need activations."""
