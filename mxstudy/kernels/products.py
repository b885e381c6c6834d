"""GEMMs of operands that are already cast."""

from __future__ import annotations

import torch
from torch import Tensor, library

from mxstudy.kernels.matmul_blocks import matmul_blocks
from mxstudy.kernels.streams import join_side_stream, side_stream
from mxstudy.numerics.gemms import Operand, gemm, gemm_dtype
from mxstudy.numerics.grid import to_dtype

TILE = 128 * 128  # elements of a product that one multiprocessor computes at once


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of bf16 values, accumulated in FP32, rounded once to bf16; on CPU an FP32 GEMM, which is faster."""
    return a @ b if a.is_cuda else to_dtype(a.float() @ b.float(), torch.bfloat16)


def scaled_product(a: Operand, b: Operand) -> Tensor:
    """Return the product of operands with bf16 values, times their scales in FP32, rounded once to bf16."""
    if a.block_size or b.block_size:
        return matmul_blocks(a, b)
    a, b = (Operand(to_dtype(o.values, gemm_dtype(o.values, torch.bfloat16)), o.scale) for o in (a, b))
    return gemm(a, b, torch.bfloat16)


@library.custom_op("mxstudy::linear_gradients", mutates_args=())
def linear_gradients(dy_wgrad: Tensor, x_wgrad: Tensor, dy_dgrad: Tensor, w_dgrad: Tensor) -> tuple[Tensor, Tensor]:
    """Return dw = dy^T x [..., out, in] and dx = dy w [..., T, in], both bf16, each from its own operands."""
    return product(dy_wgrad.mT, x_wgrad), product(dy_dgrad, w_dgrad)


@linear_gradients.register_fake
def _(dy_wgrad: Tensor, x_wgrad: Tensor, dy_dgrad: Tensor, w_dgrad: Tensor) -> tuple[Tensor, Tensor]:
    return w_dgrad.new_empty(w_dgrad.shape), x_wgrad.new_empty(x_wgrad.shape)


@linear_gradients.register_kernel("cuda")
def launch_cuda(dy_wgrad: Tensor, x_wgrad: Tensor, dy_dgrad: Tensor, w_dgrad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute both, side by side on two CUDA streams where dw leaves multiprocessors idle."""
    device = w_dgrad.device
    if w_dgrad.numel() >= TILE * torch.cuda.get_device_properties(device).multi_processor_count:
        return product(dy_wgrad.mT, x_wgrad), product(dy_dgrad, w_dgrad)
    with side_stream(device):
        dw = product(dy_wgrad.mT, x_wgrad)
    dx = product(dy_dgrad, w_dgrad)
    join_side_stream(device)
    return dw, dx
