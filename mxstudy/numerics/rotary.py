"""Rotary position embedding (Su et al. 2021) in FP32: feature i pairs with i + H/2, as in Hugging Face's Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_BTNH: Tensor, rope_TH: Tensor) -> Tensor:
    """Return x rotated, rounded once to x's dtype.

    `rope_TH`: angles [T, H / 2], or [B, T, H / 2] if positions differ.
    """
    return turn(x_BTNH, rope_TH.cos()[..., None, :], rope_TH.sin()[..., None, :])


def rotate_back(dy_BTNH: Tensor, rope_TH: Tensor) -> Tensor:
    """Return the gradient of `rotate`: dy rotated by the negative angles."""
    return turn(dy_BTNH, rope_TH.cos()[..., None, :], -rope_TH.sin()[..., None, :])


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
