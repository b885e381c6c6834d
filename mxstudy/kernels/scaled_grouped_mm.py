"""The grouped product under FP32 scales on a GPU, for experts whose operands have an outer scale or FP32 block scales.

The operator and its reference are `mxstudy.numerics.grouped_gemm.scaled_grouped_mm`, because experts are computed
there. As in torch's grouped GEMM the ends of groups are read on the device: programs that have no rows end at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxstudy.kernels.operators import BF16, ENOUGH, ceil_power_of_two, launch
from mxstudy.numerics.grouped_gemm import GROUPED_BLOCKS, scaled_grouped_mm
from mxstudy.reader import require

TILES = ((128, 128, 8), (64, 64, 4))  # rows, columns and warps: large tiles, and small ones for small products
TILES_BY_BLOCKS = ((128, 64, 8), (64, 64, 4))  # with the product of a block beside the sum
DEPTH = 64  # of the contraction axis at once, if it has no blocks


@scaled_grouped_mm.register_kernel("cuda")
def launch_cuda(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor | None,
    b_scales: Tensor | None,
    ends_E: Tensor,
    a_blocks: Tensor | None = None,
    b_blocks: Tensor | None = None,
    block_size: int = 0,
) -> Tensor:
    """Return the grouped product of bf16 matrices. A scale that is None is 1, which changes no bit."""
    from mxstudy.kernels.device.scaled_grouped_mm import scaled_grouped_mm_kernel

    require(a.dtype == b.dtype == BF16, f"dtype: the kernel multiplies bf16 matrices, not {a.dtype} and {b.dtype}")
    require(
        block_size in (0, *GROUPED_BLOCKS), f"block_size: the kernel takes one of {GROUPED_BLOCKS}, not {block_size}"
    )
    (rows, inner), columns, groups, by_rows = a.shape, b.shape[-1], len(ends_E), b.ndim == 3
    depth, sizes = block_size or DEPTH, TILES_BY_BLOCKS if block_size else TILES
    # a group has at most one incomplete tile of rows
    down = [rows // height + groups if by_rows else groups * -(-rows // height) for height, *_ in sizes]
    programs = [tiles * -(-columns // width) for tiles, (_, width, _) in zip(down, sizes, strict=True)]
    choice = programs[0] < ENOUGH
    height, width, warps = sizes[choice]
    c = a.new_empty((rows, columns) if by_rows else (groups, rows, columns))
    one = torch.ones((1, 1), device=a.device)
    scales = [one if s is None else s for s in (a_scales, b_scales)]
    strides = [*a.stride(), *by_group(b)]
    strides += [0 if size == 1 else stride for s in scales for size, stride in zip(s.shape, s.stride(), strict=True)]
    strides += [*((0, 0) if a_blocks is None else a_blocks.stride()), *by_group(b_blocks)]
    launch(
        scaled_grouped_mm_kernel,
        (programs[choice],),
        (a, b, *scales, a_blocks, b_blocks, ends_E, c, groups, rows, columns, inner, *strides),
        warps,
        BY_ROWS=by_rows,
        BY_BLOCKS=block_size > 0,
        IS_WHOLE=by_rows and inner % depth == 0,
        GROUPS=ceil_power_of_two(groups),
        HEIGHT=height,
        WIDTH=width,
        DEPTH=depth,
    )
    return c


def by_group(x: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a matrix for each group, or of one that all groups share."""
    if x is None:
        return (0, 0, 0)
    return x.stride() if x.ndim == 3 else (0, *x.stride())
