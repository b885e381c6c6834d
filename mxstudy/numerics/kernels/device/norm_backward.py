"""Backward of a norm, and the residual stream's gradient added to it.

One program has TILE_ROWS rows with all their columns, and leaves the sums over its rows; a second kernel adds these up.
Both orders follow from tiles alone: neither the number of replicas nor a row's place changes a bit.
"""

import triton
import triton.language as tl


@triton.jit
def norm_backward_kernel(
    dy_ptr,
    x_ptr,
    mean_ptr,
    rms_ptr,
    gain_ptr,
    dout_ptr,
    dx_ptr,
    sums_ptr,
    rows,
    gain_stride,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """dy, x, dout and dx [replicas, rows, COLUMNS], rows of TILE_ROWS; WIDTH: the power of two that COLUMNS fit in.

    sums float32 [3, replicas, rows / TILE_ROWS, COLUMNS]: of dy xbar, dy and dout.
    """
    replica = tl.program_id(1).to(tl.int64)
    row = replica * rows + tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    mask = column < COLUMNS
    offsets = row[:, None] * COLUMNS + column
    rms = tl.load(rms_ptr + row)[:, None] + tl.zeros((TILE_ROWS, WIDTH), tl.float32)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if mean_ptr is not None:
        x = tl.where(mask, x - tl.load(mean_ptr + row)[:, None], 0.0)
    xbar = tl.div_rn(x, rms)
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + replica * gain_stride + column, mask=mask, other=0.0).to(tl.float32)
    dxbar = dy * gain
    dx = dxbar - xbar * (tl.sum(dxbar * xbar, axis=1) / COLUMNS)[:, None]
    dx = tl.div_rn(dx, rms)
    if mean_ptr is not None:
        dx = dx - (tl.sum(dx, axis=1) / COLUMNS)[:, None]
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + offsets, (dout + dx.to(dtype).to(tl.float32)).to(dtype), mask=mask)

    tiles = rows // TILE_ROWS
    at = (replica * tiles + tl.program_id(0)) * COLUMNS + tl.arange(0, WIDTH)
    stride = tl.num_programs(1).to(tl.int64) * tiles * COLUMNS
    fits = tl.arange(0, WIDTH) < COLUMNS
    tl.store(sums_ptr + at, tl.sum(dy * xbar, axis=0), mask=fits)
    tl.store(sums_ptr + stride + at, tl.sum(dy, axis=0), mask=fits)
    tl.store(sums_ptr + 2 * stride + at, tl.sum(dout, axis=0), mask=fits)


@triton.jit
def add_up_kernel(sums_ptr, total_ptr, tiles, COLUMNS: tl.constexpr, TILES: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """sums float32 [n, tiles, COLUMNS] -> total [n, COLUMNS]; TILES: the power of two that tiles fit in."""
    n = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    tile = tl.arange(0, TILES)[:, None]
    mask = (tile < tiles) & (column < COLUMNS)[None, :]
    sums = tl.load(sums_ptr + (n * tiles + tile) * COLUMNS + column[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + n * COLUMNS + column, tl.sum(sums, axis=0), mask=column < COLUMNS)
