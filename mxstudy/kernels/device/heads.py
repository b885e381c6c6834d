"""Rotate the gradient of some heads back, and store it in its columns of both operands of a wider matrix.

PART is a `Part` of mxstudy.kernels.heads.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import store_both


@triton.jit
def heads_cast_both_kernel(
    dy_ptr, cos_ptr, sin_ptr, row_ptr, column_ptr, positions, PART: tl.constexpr, TILE: tl.constexpr, CAST: tl.constexpr
):
    """Cast dy [rows, columns] bf16 into the columns from `start` on of two operands [rows, stride].

    cos and sin: float32 [positions, half], which rows take in turn, or None; feature i is rotated with i + half.
    """
    COLUMNS: tl.constexpr = PART.columns
    HALF: tl.constexpr = PART.half
    across: tl.constexpr = COLUMNS // TILE.columns
    place = tl.program_id(0) // across * TILE.rows + tl.arange(0, TILE.rows)[:, None]
    row = place.to(tl.int64)
    column = tl.program_id(0) % across * TILE.columns + tl.arange(0, TILE.columns)[None, :]
    dy = tl.load(dy_ptr + row * COLUMNS + column).to(tl.float32)
    if cos_ptr is not None:
        is_first = column % (2 * HALF) < HALF
        partner = tl.where(is_first, column + HALF, column - HALF)
        angle = place % positions * HALF + column % HALF
        turned = tl.load(dy_ptr + row * COLUMNS + partner).to(tl.float32) * tl.load(sin_ptr + angle)
        dy = dy * tl.load(cos_ptr + angle) + tl.where(is_first, turned, -turned)
    there = row * PART.stride + PART.start + column
    store_both(dy, row_ptr, column_ptr, there, None, True, CAST)
