"""Rotary position embedding (Su et al. 2021) in FP32: feature i pairs with i + H/2, as in Hugging Face's Llama."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mxstudy.config import Llama3RopeScaling


def frequencies(head_size: int, theta: float, device: torch.device) -> Tensor:
    """Return the angle by which one position turns each pair of a head's features: float32 [H / 2]."""
    half = head_size // 2
    return theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)


def slowed(frequencies_H: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Return Llama 3.1's frequencies: those that turn rarely in the original length are divided by the factor."""
    turns_H = scaling.original_length * frequencies_H / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_H = ((turns_H - low) / (high - low)).clamp(0, 1)
    return (1 - kept_H) * frequencies_H / scaling.factor + kept_H * frequencies_H


def rotate(x_BTNH: Tensor, rope_TH: Tensor) -> Tensor:
    """Return x rotated, rounded once to x's dtype.

    `rope_TH`: angles [T, H / 2], or [B, T, H / 2] if positions differ.
    """
    return turn(x_BTNH, rope_TH.cos()[..., None, :], rope_TH.sin()[..., None, :])


def rotate_back(dy_BTNH: Tensor, rope_TH: Tensor) -> Tensor:
    """Return the gradient of `rotate`: dy rotated by the negative angles."""
    return turn(dy_BTNH, rope_TH.cos()[..., None, :], -rope_TH.sin()[..., None, :])


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [..., H] with pairs (i, i + H/2) rotated in FP32, rounded once; cos and sin [..., H / 2]."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
