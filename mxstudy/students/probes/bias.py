"""Measure the gradient's bias by layer: a run's gradients against those of FP32, at the same weights or a twin's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mxstudy.probes.gradient_bias import WHOLE, quantities

PerReplica = dict[str, list[float]]  # {'<tensor>/<quantity>': one value per replica}


def gradient_bias(own: Mapping[str, Tensor], true: Mapping[str, Tensor]) -> PerReplica:
    """Return '<layer>/<quantity>', and 'model/<quantity>' over all parameters as one vector, from gradients [S, ...].

    The quantities are those of `mxstudy.probes.gradient_bias`: ratio is the instability paper's lower bound on the
    operator norm of zeta (Eq. 5), and squared_ratio is what its public code logs. For two unrelated vectors of equal
    length, squared_ratio is 2 and the cosine 0.
    """
    layers: dict[str, Tensor] = {}
    for name, g in own.items():
        layer, squares = ".".join(name.split(".")[:2]), squared_norms_of_replicas(g, true[name])
        layers[layer] = layers[layer] + squares if layer in layers else squares
    values = np.array([squares.tolist() for squares in layers.values()])  # [layers, 3, S]
    names = [*layers, WHOLE]
    measured = quantities(*np.concatenate((values, values.sum(0, keepdims=True))).transpose(1, 0, 2))
    return {f"{name}/{q}": row.tolist() for q, rows in measured.items() for name, row in zip(names, rows, strict=True)}


def squared_norms_of_replicas(g: Tensor, h: Tensor) -> Tensor:
    """Return ||g||^2, ||h||^2 and ||g - h||^2 of each replica: float64 [3, S]."""
    return torch.stack([x.flatten(1).square().sum(1, dtype=torch.float64) for x in (g, h, g - h)])
