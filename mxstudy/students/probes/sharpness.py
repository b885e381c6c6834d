"""Measure sharpness, the largest eigenvalue of the FP32 loss's Hessian, and how it bounds the learning rate.

Eq. 10 of the instability paper: gradient descent with learning rate lr, on gradients (1 + zeta) g, is stable along the
sharpest direction if |1 - lr * lambda| + lr * ||zeta|| * lambda <= 1. With zeta = 0 that is lambda <= 2 / lr; with
||zeta|| <= 1 it is lambda <= 2 / (lr * (1 + ||zeta||)), and with ||zeta|| > 1 no lambda > 0 satisfies it. The paper
calls the bound crude, and not rigorous for Adam (footnote 3). It ignores momentum: Adam at rest with its default
beta1 = 0.9 is stable up to 38 / lr in the preconditioned Hessian's eigenvalue (Cohen et al. 2022, arXiv 2207.14484).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mxstudy.model.seeds import generator_for
from mxstudy.students.model import ResidualMLP
from mxstudy.students.probes.shadow import Loss, smooth_forward, trainable

START_SEED = 0

Vector = Sequence[Tensor]  # one tensor [S, rows, columns] per parameter, in its shape
Operator = Callable[[Vector], Vector]


class Eigenpair(NamedTuple):
    """An eigenvalue's estimate `value` [S], `residual` [S] = ||H v - value v|| / |value| with ||v|| = 1, and `vector`.

    The next measurement starts from `vector`. An eigenvalue lies within residual * |value| of `value`, so a large
    residual means that the iteration has not converged.
    """

    value: Tensor
    residual: Tensor
    vector: Vector


def hessian(model: ResidualMLP, loss: Loss, x_STD: Tensor, target_STD: Tensor) -> Operator:
    """Return the function v -> H v, where H is the Hessian of each replica's FP32 loss by its trainable parameters."""
    parameters = list(trainable(model).values())
    with torch.enable_grad():
        losses = loss(smooth_forward(model, x_STD), target_STD)
        gradients = torch.autograd.grad(losses.sum(), parameters, create_graph=True)
    return lambda vector: torch.autograd.grad(gradients, parameters, vector, retain_graph=True)


def preconditioned(product: Operator, diagonal: Vector) -> Operator:
    """Return the operator P^-1/2 H P^-1/2, which has the eigenvalues of P^-1 H; `diagonal`: that of P, positive."""
    scales = [p.rsqrt() for p in diagonal]

    def scaled(vector: Vector) -> Vector:
        return [v * scale for v, scale in zip(vector, scales, strict=True)]

    return lambda vector: scaled(product(scaled(vector)))


@torch.no_grad()
def largest_eigenvalue(product: Operator, model: ResidualMLP, iterations: int, last: Vector | None = None) -> Eigenpair:
    """Return each replica's largest eigenvalue by power iteration.

    It starts from `last` in replicas where that is finite, else from random numbers of a fixed seed, which are the same
    for all replicas. Power iteration finds the eigenvalue of the largest magnitude; if that turns out negative, the
    spectrum is shifted up until the largest eigenvalue also has the largest magnitude.
    """
    parameters = trainable(model)
    start = [cold_start(name, parameter) for name, parameter in parameters.items()]
    if last is not None:
        is_usable = per_replica(norm(last).isfinite())
        start = [torch.where(is_usable, warm, cold) for warm, cold in zip(last, start, strict=True)]
    return power_iteration(product, start, iterations)


def cold_start(name: str, parameter: Tensor) -> Tensor:
    numbers = torch.randn(parameter.shape[1:], generator=generator_for(START_SEED, f"sharpness.{name}"))
    return numbers.to(parameter.device).expand_as(parameter)


def power_iteration(product: Operator, start: Vector, iterations: int) -> Eigenpair:
    vector = unit(start)
    shift = torch.zeros_like(norm(start))
    for _ in range(iterations):
        image = product(vector)
        value = dot(vector, image)
        residual = norm(plus(image, -value, vector)) / value.abs()
        shift = torch.where(value < 0, torch.maximum(shift, norm(image)), shift)
        vector = unit(plus(image, shift, vector))
    return Eigenpair(value, residual, vector)


def stability(value: Tensor, lr: Tensor, zeta: Tensor) -> Tensor:
    """Return the left side of Eq. 10, [S]; above 1 it violates the paper's bound. `zeta`: ||zeta|| or a lower bound."""
    return (1 - lr * value).abs() + lr * zeta * value


# ---------------------------------------------------------------- vectors: one norm and one factor per replica


def dot(a: Vector, b: Vector) -> Tensor:
    """Return the inner product in each replica: float64 [S]."""
    return torch.stack([(x * y).flatten(1).sum(1, dtype=torch.float64) for x, y in zip(a, b, strict=True)]).sum(0)


def norm(a: Vector) -> Tensor:
    return dot(a, a).sqrt()


def per_replica(factor: Tensor) -> Tensor:
    """Return a factor per replica [S] as [S, 1, 1], to broadcast over parameters."""
    return factor.view(-1, 1, 1)


def plus(a: Vector, factor: Tensor, b: Vector) -> Vector:
    """Return a + factor * b."""
    return [x + per_replica(factor).to(x.dtype) * y for x, y in zip(a, b, strict=True)]


def unit(a: Vector) -> Vector:
    """Return a / ||a||, or 0 in replicas where a is 0."""
    length = per_replica(norm(a))
    return [x / length.to(x.dtype).clamp_min(torch.finfo(x.dtype).tiny) for x in a]
