"""The product of operands with FP32 block scales, each block of the contraction axis scaled before the sum."""

from __future__ import annotations

import math

from torch import Tensor, library

from mxstudy.kernels.operators import BF16, ENOUGH, launch
from mxstudy.numerics.gemms import Operand, common_block_size, gemm, gemm_dtype
from mxstudy.numerics.grid import to_dtype

TILES = ((128, 64, 8), (64, 64, 4))  # rows, columns and warps: large tiles, and small ones for small products


def matmul_blocks(a: Operand, b: Operand) -> Tensor:
    """Return a [M, K] times b [K, N] in bf16, as `numerics.gemms.gemm` does for FP32 block scales of one or of both.

    On a GPU one kernel computes all blocks: a GEMM for each would write and read an FP32 [M, N] as often as there are
    blocks. Sums within a block are in another order than there, everything else is the same.
    """
    size, scales = common_block_size(a, b), [o.scale for o in (a, b) if o.scale is not None]
    scale = math.prod(scales[1:], start=scales[0]) if scales else None
    return _matmul_blocks(a.values, b.values, a.block_scales, b.block_scales, scale, size)


@library.custom_op("mxstudy::matmul_blocks", mutates_args=())
def _matmul_blocks(
    a: Tensor, b: Tensor, a_scales: Tensor | None, b_scales: Tensor | None, scale: Tensor | None, block_size: int
) -> Tensor:
    of_gemm = gemm_dtype(a, BF16)
    one = Operand(to_dtype(a, of_gemm), scale, a_scales, block_size)
    other = Operand(to_dtype(b, of_gemm), None, b_scales, block_size)
    return gemm(one, other, BF16)


@_matmul_blocks.register_fake
def _(a: Tensor, b: Tensor, *options: object) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=BF16)


@_matmul_blocks.register_kernel("cuda")
def launch_cuda(
    a: Tensor, b: Tensor, a_scales: Tensor | None, b_scales: Tensor | None, scale: Tensor | None, block_size: int
) -> Tensor:
    from mxstudy.kernels.device.matmul_blocks import matmul_blocks_kernel

    (rows, inner), columns = a.shape, b.shape[1]
    programs = [-(-rows // height) * -(-columns // width) for height, width, _ in TILES]
    choice = programs[0] < ENOUGH
    height, width, warps = TILES[choice]
    c = a.new_empty((rows, columns), dtype=BF16)
    strides = [stride for x in (a, b, a_scales, b_scales) for stride in ((0, 0) if x is None else x.stride())]
    launch(
        matmul_blocks_kernel,
        (programs[choice],),
        (a, b, a_scales, b_scales, scale, c, rows, columns, *strides),
        warps,
        INNER=inner,
        BLOCK=block_size,
        HEIGHT=height,
        WIDTH=width,
    )
    return c
