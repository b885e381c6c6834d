"""The grouped product under FP32 scales on a GPU, for experts whose operands have an outer scale.

The operator and its reference are `mxstudy.numerics.experts.scaled_grouped_mm`, because experts are computed there. As
in torch's grouped GEMM the ends of groups are read on the device: programs that have no rows end at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxstudy.kernels.operators import BF16, ENOUGH, ceil_power_of_two, launch
from mxstudy.numerics.experts import scaled_grouped_mm
from mxstudy.reader import require

TILES = ((128, 128, 8), (64, 64, 4))  # rows, columns and warps: large tiles, and small ones for small products
DEPTH = 64  # of the contraction axis at once


@scaled_grouped_mm.register_kernel("cuda")
def launch_cuda(a: Tensor, b: Tensor, a_scales: Tensor | None, b_scales: Tensor | None, ends_E: Tensor) -> Tensor:
    """Return the grouped product of bf16 matrices. A scale that is None is 1, which changes no bit."""
    from mxstudy.kernels.device.scaled_grouped_mm import scaled_grouped_mm_kernel

    require(a.dtype == b.dtype == BF16, f"dtype: the kernel multiplies bf16 matrices, not {a.dtype} and {b.dtype}")
    (rows, inner), columns, groups, by_rows = a.shape, b.shape[-1], len(ends_E), b.ndim == 3
    # a group has at most one incomplete tile of rows
    down = [rows // height + groups if by_rows else groups * -(-rows // height) for height, *_ in TILES]
    programs = [tiles * -(-columns // width) for tiles, (_, width, _) in zip(down, TILES, strict=True)]
    choice = programs[0] < ENOUGH
    height, width, warps = TILES[choice]
    c = a.new_empty((rows, columns) if by_rows else (groups, rows, columns))
    one = torch.ones((1, 1), device=a.device)
    scales = [one if s is None else s for s in (a_scales, b_scales)]
    strides = [*a.stride(), *(b.stride() if by_rows else (0, *b.stride()))]
    strides += [0 if size == 1 else stride for s in scales for size, stride in zip(s.shape, s.stride(), strict=True)]
    launch(
        scaled_grouped_mm_kernel,
        (programs[choice],),
        (a, b, *scales, ends_E, c, groups, rows, columns, inner, *strides),
        warps,
        BY_ROWS=by_rows,
        IS_WHOLE=by_rows and inner % DEPTH == 0,
        GROUPS=ceil_power_of_two(groups),
        HEIGHT=height,
        WIDTH=width,
        DEPTH=DEPTH,
    )
    return c
