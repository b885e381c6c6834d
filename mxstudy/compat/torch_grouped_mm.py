"""torch's grouped GEMM, which in torch 2.11 has a private name alone. Checked with 2.13 on CPU.

Its inputs are bf16 on a GPU, its result has their dtype, and it accumulates in FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Return a [N, K] times b [E, K, M] by groups of rows, or the groups of a [M, N] times b [N, K]: [E, M, K].

    `ends_E`: int32, where each group of the N ends.
    """
    return torch._grouped_mm(a, b, offs=ends_E)
