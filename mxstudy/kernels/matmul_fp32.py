"""A linear layer in float32 that runs on tensor cores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from mxstudy.kernels.operators import ENOUGH, launch, power_of_two_in

TILES = ((128, 32, 128), (64, 32, 64))  # rows, inner, columns: large tiles, and small ones for small products
LEAST = 16  # the smallest tile side that a tensor core multiplies


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [T, in] times weight [out, in] transposed: [T, out], all float32; in a stack all have a leading [S]."""
    return _LinearFP32.apply(x, weight)


class _LinearFP32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return matmul_fp32(x, weight.mT)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return matmul_fp32(dy, weight), matmul_fp32(dy.mT, x)


@library.custom_op("mxstudy::matmul_fp32", mutates_args=())
def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, float32 [M, N], of float32 [M, K] and [K, N], or [S, M, N] of [S, M, K] and [S, K, N].

    On a GPU every product is the sum of three TF32 products, whose error against float64 is no larger than that of an
    FP32 GEMM: what the three leave out is less than FP32 rounds away.
    """
    return a @ b


@matmul_fp32.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


@matmul_fp32.register_kernel("cuda")
def launch_cuda(a: Tensor, b: Tensor) -> Tensor:
    from mxstudy.kernels.device.matmul_fp32 import matmul_fp32_kernel

    sizes = (a.shape[-2], a.shape[-1], b.shape[-1])
    batch = a.shape[0] if a.ndim > 2 else 1
    programs = batch * sizes[0] * sizes[2] // (TILES[0][0] * TILES[0][2])
    tile = [min(power_of_two_in(size), limit) for size, limit in zip(sizes, TILES[programs < ENOUGH], strict=True)]
    if min(tile) < LEAST:
        return a @ b
    c = a.new_empty(*a.shape[:-1], sizes[2])
    launch(
        matmul_fp32_kernel,
        (sizes[0] // tile[0] * (sizes[2] // tile[2]), batch),
        (a.contiguous(), b.mT.contiguous(), c),  # tensor cores read TF32 along the inner axis
        8 if tile[0] * tile[2] >= 128 * 128 else 4,
        ROWS=sizes[0],
        INNER=sizes[1],
        COLUMNS=sizes[2],
        TILE_ROWS=tile[0],
        TILE_INNER=tile[1],
        TILE_COLUMNS=tile[2],
    )
    return c
