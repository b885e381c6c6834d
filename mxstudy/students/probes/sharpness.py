"""Sharpness: the largest eigenvalue of the Hessian of the FP32 loss, and how it bounds the learning rate.

Eq. 10 of the instability paper: gradient descent with learning rate lr, on gradients (1 + zeta) g, is stable along the
sharpest direction if |1 - lr * lambda| + lr * ||zeta|| * lambda <= 1. With zeta = 0 that is lambda <= 2 / lr; with
||zeta|| <= 1 it is lambda <= 2 / (lr * (1 + ||zeta||)), and with ||zeta|| > 1 no lambda > 0 satisfies it. The paper
calls it crude, and not rigorous for Adam (footnote 3). It has no momentum in it: Adam at rest with its default
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

Vector = Sequence[Tensor]  # of the parameters' shapes, each [S, rows, columns]
Operator = Callable[[Vector], Vector]


class Eigenpair(NamedTuple):
    """`value` [S], `residual` [S]: ||H v - value v|| / |value| for ||v|| = 1; `vector`: where to go on from.

    An eigenvalue lies within residual * |value| of the value: a large residual is one that has not converged.
    """

    value: Tensor
    residual: Tensor
    vector: Vector


def hessian(model: ResidualMLP, loss: Loss, x_STD: Tensor, target_STD: Tensor) -> Operator:
    """Products of a vector with the Hessian of each replica's FP32 loss by its trainable parameters."""
    parameters = list(trainable(model).values())
    with torch.enable_grad():
        losses = loss(smooth_forward(model, x_STD), target_STD)
        gradients = torch.autograd.grad(losses.sum(), parameters, create_graph=True)
    return lambda vector: torch.autograd.grad(gradients, parameters, vector, retain_graph=True)


def preconditioned(product: Operator, diagonal: Vector) -> Operator:
    """P^-1/2 H P^-1/2, which has the eigenvalues of P^-1 H; `diagonal`: of P, positive."""
    scales = [p.rsqrt() for p in diagonal]

    def scaled(vector: Vector) -> Vector:
        return [v * scale for v, scale in zip(vector, scales, strict=True)]

    return lambda vector: scaled(product(scaled(vector)))


@torch.no_grad()
def largest_eigenvalue(product: Operator, model: ResidualMLP, iterations: int, last: Vector | None = None) -> Eigenpair:
    """By power iteration from `last`, for replicas where that is finite, else from numbers of a fixed seed.

    Those are the same for all replicas, whatever their slot. The method finds the eigenvalue of the largest magnitude;
    where that shows to be negative, the spectrum is moved up until the largest one is.
    """
    parameters = trainable(model)
    start = [cold_start(name, parameter) for name, parameter in parameters.items()]
    if last is not None:
        goes_on = spread(norm(last).isfinite())
        start = [torch.where(goes_on, warm, cold) for warm, cold in zip(last, start, strict=True)]
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
    """The left side of Eq. 10, [S]: above 1 the paper's bound is broken. `zeta` is ||zeta||, or a lower bound on it."""
    return (1 - lr * value).abs() + lr * zeta * value


# ------------------------------------------------------------------------- vectors: a norm and a factor a replica


def dot(a: Vector, b: Vector) -> Tensor:
    """float64 [S]."""
    return torch.stack([(x * y).flatten(1).sum(1, dtype=torch.float64) for x, y in zip(a, b, strict=True)]).sum(0)


def norm(a: Vector) -> Tensor:
    return dot(a, a).sqrt()


def spread(factor: Tensor) -> Tensor:
    return factor.view(-1, 1, 1)


def plus(a: Vector, factor: Tensor, b: Vector) -> Vector:
    """a + factor * b."""
    return [x + spread(factor).to(x.dtype) * y for x, y in zip(a, b, strict=True)]


def unit(a: Vector) -> Vector:
    """a / ||a||, and 0 where a is 0."""
    length = spread(norm(a))
    return [x / length.to(x.dtype).clamp_min(torch.finfo(x.dtype).tiny) for x in a]
