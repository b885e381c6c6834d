"""A linear layer in float32 that runs on tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from mxstudy.numerics.kernels.operands import launch, power_of_two_in

ROWS, COLUMNS, INNER = 64, 64, 32  # of a tile
LEAST = 16  # rows and columns that a tensor core multiplies


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] and weight [out, in] float32 -> x weight^T [T, out] float32, without a gradient.

    On a GPU every product is the sum of three of TF32, which leaves out less than FP32 rounds away: the error beside
    float64 is no larger than that of an FP32 GEMM, in two thirds of its time.
    """
    return _linear_fp32(x, weight)


@torch.library.custom_op("mxstudy::linear_fp32", mutates_args=())
def _linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


@_linear_fp32.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_linear_fp32.register_kernel("cuda")
def run(x: Tensor, weight: Tensor) -> Tensor:
    from mxstudy.numerics.kernels.device.linear_fp32 import linear_fp32_kernel

    sizes = ((x.shape[0], ROWS), (weight.shape[0], COLUMNS), (x.shape[1], INNER))
    rows, columns, inner = (min(power_of_two_in(size), at_most) for size, at_most in sizes)
    if min(rows, columns, inner) < LEAST:
        return x @ weight.mT
    y = x.new_empty(x.shape[0], weight.shape[0])
    launch(
        linear_fp32_kernel,
        (x.shape[0] // rows * (weight.shape[0] // columns),),
        (x.contiguous(), weight.contiguous(), y),
        4,
        INNER=x.shape[1],
        COLUMNS=weight.shape[0],
        TILE_ROWS=rows,
        TILE_COLUMNS=columns,
        TILE_INNER=inner,
    )
    return y
