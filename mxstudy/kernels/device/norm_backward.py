"""Backward of a norm, and the residual stream's gradient added to it.

One program takes tiles of TILE_ROWS rows with all their columns, one after another, and stores the sums over its rows;
a second kernel adds these up. Both orders follow from rows and columns only: the number of replicas changes no bit.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.division import quotient


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
    TURNS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Compute dx and partial sums: dy, x, dout and dx [replicas, rows, COLUMNS], rows a multiple of TILE_ROWS.

    WIDTH: the smallest power of two that is at least COLUMNS. sums: float32 [SUMS, replicas, programs, COLUMNS], of dy
    xbar, dy and dout.
    """
    replica = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)
    fits = column < COLUMNS
    gain = tl.load(gain_ptr + replica * gain_stride + column, mask=fits, other=0.0).to(tl.float32)[None, :]
    dtype: tl.constexpr = dx_ptr.dtype.element_ty
    of_gain = tl.zeros((WIDTH,), tl.float32)
    of_dy = tl.zeros((WIDTH,), tl.float32)
    of_dout = tl.zeros((WIDTH,), tl.float32)
    for turn in range(TURNS):
        row = (tl.program_id(0) * TURNS + turn) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        exists = row < rows
        mask = exists[:, None] & fits[None, :]
        row = replica * rows + row
        offsets = row[:, None] * COLUMNS + column[None, :]
        rms = tl.load(rms_ptr + row, mask=exists, other=1.0)[:, None]
        inverse = tl.div_rn(tl.zeros_like(rms) + 1.0, rms)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if mean_ptr is not None:
            x = tl.where(mask, x - tl.load(mean_ptr + row, mask=exists, other=0.0)[:, None], 0.0)
        xbar = quotient(x, rms, inverse)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dxbar = dy * gain
        dx = dxbar - xbar * (tl.sum(dxbar * xbar, axis=1) / COLUMNS)[:, None]
        dx = quotient(dx, rms, inverse)
        if mean_ptr is not None:
            dx = dx - (tl.sum(dx, axis=1) / COLUMNS)[:, None]
        dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, (dout + dx.to(dtype).to(tl.float32)).to(dtype), mask=mask)
        of_gain += tl.sum(dy * xbar, axis=0)
        if SUMS > 1:
            of_dy += tl.sum(dy, axis=0)
        if SUMS > 2:
            of_dout += tl.sum(dout, axis=0)

    programs = tl.num_programs(0)
    at = (replica * programs + tl.program_id(0)) * COLUMNS + column
    stride = tl.num_programs(1).to(tl.int64) * programs * COLUMNS
    tl.store(sums_ptr + at, of_gain, mask=fits)
    if SUMS > 1:
        tl.store(sums_ptr + stride + at, of_dy, mask=fits)
    if SUMS > 2:
        tl.store(sums_ptr + 2 * stride + at, of_dout, mask=fits)


@triton.jit
def add_up_kernel(sums_ptr, total_ptr, tiles, COLUMNS: tl.constexpr, TILES: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Sum over tiles: float32 [n, tiles, COLUMNS] -> total [n, COLUMNS]; TILES: the power of two from `tiles` up."""
    n = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    tile = tl.arange(0, TILES)[:, None]
    mask = (tile < tiles) & (column < COLUMNS)[None, :]
    sums = tl.load(sums_ptr + (n * tiles + tile) * COLUMNS + column[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + n * COLUMNS + column, tl.sum(sums, axis=0), mask=column < COLUMNS)
