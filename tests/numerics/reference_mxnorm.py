"""Compute MXNorm's estimate of the RMS in float64 numpy, with its coefficient from the density of a block's absmax."""

from __future__ import annotations

import math

import numpy as np
from reference import Array


def rms_coefficient_by_density(p: float, block_size: int, points: int = 400) -> float:
    """Return E[max_b |Z_b|^p]^(-1/p) for B half-normals.

    It integrates t^p with the density B F^(B-1) f of their maximum.
    """
    nodes, weights = np.polynomial.legendre.leggauss(points)
    t, w = 6.0 * (nodes + 1), 6.0 * weights  # [0, 12]: beyond lies less than 1e-32
    cdf = np.array([math.erf(v / math.sqrt(2)) for v in t])
    density = block_size * cdf ** (block_size - 1) * math.sqrt(2 / math.pi) * np.exp(-(t**2) / 2)
    return float((w * t**p * density).sum() ** (-1 / p))


def block_absmax(x: Array, block_size: int) -> Array:
    """Return the absmax of blocks: [..., D] -> [..., D / B]."""
    return np.abs(x.reshape(*x.shape[:-1], -1, block_size)).max(-1)


def rms_estimate_array(x: Array, p: float, block_size: int, eps: float) -> Array:
    """Return coef * (mean_k m_k^p)^(1/p) + eps, [..., 1]."""
    mean = (block_absmax(x, block_size) ** p).mean(-1, keepdims=True) ** (1 / p)
    return rms_coefficient_by_density(p, block_size) * mean + eps
