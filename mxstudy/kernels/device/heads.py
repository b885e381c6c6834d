"""Rotate heads, or rotate their gradient back, and store them in their columns of a wider matrix, cast or not.

PART is a `Part` of mxstudy.kernels.heads. A program has some columns of the first half of a head, and those of the
second half that they are rotated with, of several heads: the angles are read once for all of them.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import store_both


@triton.jit
def heads_cast_both_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    row_ptr,
    column_ptr,
    rows,
    positions,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Cast heads bf16, rows `read_stride` apart, into the columns from `start` on of two operands [rows, stride].

    cos and sin: float32 [positions, half], which rows take in turn, or None; feature i is rotated with i + half. An
    operand may be the matrix that the heads are read from.
    """
    HALF: tl.constexpr = PART.half
    TOGETHER: tl.constexpr = PART.together
    COLUMNS: tl.constexpr = TILE.columns
    parts: tl.constexpr = HALF // COLUMNS
    across: tl.constexpr = parts * (PART.heads // TOGETHER)
    place = tl.program_id(0) // across * TILE.rows + tl.arange(0, TILE.rows)[:, None]
    row = place.to(tl.int64)
    feature = tl.program_id(0) % parts * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    column = tl.program_id(0) % across // parts * (TOGETHER * 2 * HALF) + feature
    mask = place < rows
    if cos_ptr is not None:
        angle = place % positions * HALF + feature
        cos = tl.load(cos_ptr + angle, mask=mask)
        sin = tl.load(sin_ptr + angle, mask=mask)

    first = ()
    second = ()
    for head in tl.static_range(TOGETHER):
        there = x_ptr + row * PART.read_stride + column + head * (2 * HALF)
        first += (tl.load(there, mask=mask),)
        second += (tl.load(there + HALF, mask=mask),)
    for head in tl.static_range(TOGETHER):
        there = row * PART.stride + PART.start + column + head * (2 * HALF)
        a, b = first[head].to(tl.float32), second[head].to(tl.float32)
        if cos_ptr is not None:
            if PART.back:
                a, b = a * cos + b * sin, b * cos - a * sin
            else:
                a, b = a * cos - b * sin, b * cos + a * sin
        store_both(a, row_ptr, column_ptr, there, mask, True, CAST)
        store_both(b, row_ptr, column_ptr, there + HALF, mask, True, CAST)
