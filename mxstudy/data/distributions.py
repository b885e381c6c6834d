"""Random tensors that imitate what a model holds: rows of activations, outputs of GELU, gains of norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

Sampler = Callable[[Sequence[int], Generator], Tensor]


def gaussian(shape: Sequence[int], generator: Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def uniform(shape: Sequence[int], generator: Generator) -> Tensor:
    """Return uniform numbers with mean 0 and variance 1."""
    return (torch.rand(*shape, generator=generator) - 0.5) * 12**0.5


def laplace(shape: Sequence[int], generator: Generator) -> Tensor:
    """Return Laplace-distributed numbers with mean 0 and variance 1."""
    magnitude = torch.empty(*shape).exponential_(2**0.5, generator=generator)
    return torch.where(torch.rand(*shape, generator=generator) < 0.5, -magnitude, magnitude)


def log_normal(shape: Sequence[int], generator: Generator) -> Tensor:
    """Return exp(N(0, 0.02)): like the gains of a norm that were initialised to 1 and trained for a while."""
    return torch.exp(0.02 * gaussian(shape, generator))


def around(mean: float, std: float) -> Sampler:
    return lambda shape, generator: mean + std * gaussian(shape, generator)


DISTRIBUTIONS: dict[str, Sampler] = {
    "gaussian": gaussian,
    "uniform": uniform,
    "laplace": laplace,
    "gelu": lambda shape, generator: F.gelu(gaussian(shape, generator)),
    "log_normal": log_normal,
    "gain 1.02 +- 0.003": around(1.02, 0.003),
    "gain 0.99 +- 0.003": around(0.99, 0.003),
    "gain 0.95 +- 0.02": around(0.95, 0.02),
}


def with_outliers(x: Tensor, factor: float, features: int) -> Tensor:
    """Return x [rows, size] with `features` evenly spaced features multiplied by `factor` in every row."""
    scale = torch.ones(x.shape[-1])
    scale[torch.arange(features) * (x.shape[-1] // features)] = factor
    return x * scale
