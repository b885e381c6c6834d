"""Products of float32 matrices on tensor cores, each as three TF32 products."""

import triton
import triton.language as tl


@triton.jit
def matmul_fp32_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Multiply a [batch, ROWS, INNER] by b [batch, COLUMNS, INNER] transposed: c [batch, ROWS, COLUMNS]."""
    across: tl.constexpr = COLUMNS // TILE_COLUMNS
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) // across * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(0) % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inner = tl.arange(0, TILE_INNER)
    a = a_ptr + (batch * ROWS + row[:, None]) * INNER + inner[None, :]
    b = b_ptr + (batch * COLUMNS + column[None, :]) * INNER + inner[:, None]
    sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for _ in range(0, INNER, TILE_INNER):
        sums = tl.dot(tl.load(a), tl.load(b), sums, input_precision="tf32x3")
        a += TILE_INNER
        b += TILE_INNER
    tl.store(c_ptr + (batch * ROWS + row[:, None]) * COLUMNS + column[None, :], sums)
