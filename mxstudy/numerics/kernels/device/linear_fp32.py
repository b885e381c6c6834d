"""x W^T of float32, each product of three TF32 ones."""

import triton
import triton.language as tl


@triton.jit
def linear_fp32_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
):
    """x [rows, INNER], w [COLUMNS, INNER], y [rows, COLUMNS]; tiles divide them."""
    across: tl.constexpr = COLUMNS // TILE_COLUMNS
    row = (tl.program_id(0) // across * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    column = tl.program_id(0) % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inner = tl.arange(0, TILE_INNER)
    sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for start in range(0, INNER, TILE_INNER):
        x = tl.load(x_ptr + row * INNER + (start + inner)[None, :])
        w = tl.load(w_ptr + column[None, :] * INNER + (start + inner)[:, None])
        sums = tl.dot(x, w, sums, input_precision="tf32x3")
    tl.store(y_ptr + row * COLUMNS + column[None, :], sums)
