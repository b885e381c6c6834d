"""The activation functions of the decoder's MLP, and the table of those that fused kernels compute."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mxstudy.numerics.vector_ops import gelu_op_by_op, silu_op_by_op


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., ffn_size]; `gate_up` is [..., 2 * ffn_size], the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def swiglu_op_by_op(gate_up: Tensor) -> Tensor:
    """Return `swiglu` in bf16, each operation rounded to bf16."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_op_by_op(gate) * up


# From each activation to the version that rounds after every operation; in squared ReLU one operation rounds.
OP_BY_OP = {swiglu: swiglu_op_by_op, F.gelu: gelu_op_by_op, relu2: relu2}

# From each activation that fused kernels compute, as the reference's function, to its name in the kernels.
KERNEL_ACTIVATIONS = {swiglu: "swiglu", F.gelu: "gelu", relu2: "relu2"}
