"""The gradient of some heads, rotated back, to its columns of both operands of a matrix that has more."""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast import store_both, through_bf16


@triton.jit
def heads_cast_both_kernel(
    dy_ptr,
    cos_ptr,
    sin_ptr,
    row_ptr,
    column_ptr,
    positions,
    START: tl.constexpr,
    STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
    AWAY: tl.constexpr,
    PRE_ROUND: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """dy [rows, COLUMNS] bf16 -> columns START and after of operands [rows, STRIDE].

    cos and sin float32 [positions, HALF], which rows have in turn, or None; feature i turns with i + HALF.
    """
    across: tl.constexpr = COLUMNS // TILE_COLUMNS
    place = tl.program_id(0) // across * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    row = place.to(tl.int64)
    column = tl.program_id(0) % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    dy = tl.load(dy_ptr + row * COLUMNS + column).to(tl.float32)
    if cos_ptr is not None:
        is_first = column % (2 * HALF) < HALF
        partner = tl.where(is_first, column + HALF, column - HALF)
        angle = place % positions * HALF + column % HALF
        turned = tl.load(dy_ptr + row * COLUMNS + partner).to(tl.float32) * tl.load(sin_ptr + angle)
        dy = dy * tl.load(cos_ptr + angle) + tl.where(is_first, turned, -turned)
        dy = through_bf16(dy, True)
    there = row * STRIDE + START + column
    store_both(dy, row_ptr, column_ptr, there, None, ROW, COLUMN, BLOCK, AWAY, PRE_ROUND)
