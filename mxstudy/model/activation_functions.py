"""Activations of the decoder's MLP, and which of them fused kernels compute."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 * ffn_size], the gate first -> silu(gate) * up, [..., ffn_size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


# Activations that fused kernels compute, by the very function that the reference applies.
KERNEL_ACTIVATIONS = {swiglu: "swiglu", F.gelu: "gelu", relu2: "relu2"}
