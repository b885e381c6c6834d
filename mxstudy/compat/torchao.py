"""torchao: its MX tensor, whose @ is the hardware's MX GEMM. Checked with torchao 0.17.0 and 0.18.0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mx_matrix(codes: Tensor, scales: Tensor, block_size: int, dtype: torch.dtype, kernels: str) -> Tensor:
    """Return a quantised matrix as torchao's MXTensor, which decodes to `dtype`; blocks lie along the last axis.

    codes: float8 [rows, columns], or uint8 with two E2M1 to a byte. scales: E8M0, not swizzled. `kernels`: AUTO, or
    EMULATED, which decodes and multiplies in high precision.

    Why here: the class and the order of its arguments are in torchao's `prototype`, which makes no promises.
    """
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    element: Any = torch.float4_e2m1fn_x2 if codes.dtype == torch.uint8 else codes.dtype
    quantised_by = None  # nothing: activations are quantised already
    is_swizzled = False
    return MXTensor(codes, scales, element, block_size, dtype, KernelPreference[kernels], quantised_by, is_swizzled)
