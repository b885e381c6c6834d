"""Backward of a norm whose output feeds a branch, together with the sum of that branch and the norm's input."""

from __future__ import annotations

import torch
from torch import Tensor, library

from mxstudy.kernels.operators import Tile, ceil_power_of_two, check_tile, launch, power_of_two_in
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.norm_linear import center, norm_backward, normalize

MOST_PROGRAMS = 1024  # per replica, so that the partial sums that they leave to be added up stay few
FP32 = torch.float32


def norm_backward_add(
    dy: Tensor, x: Tensor, mean: Tensor | None, rms: Tensor, gain: Tensor, dout: Tensor, sums: int = 3
) -> tuple[Tensor, Tensor]:
    """Return dx and sums over the rows, for y = (x - mean) / rms * gain + bias and out = x + branch(y).

    dy bf16, x and dout [rows, columns] or [S, rows, columns] in one dtype, mean and rms float32 [..., 1], gain
    [columns] or [S, 1, columns]. dx has x's dtype and is rounded to it before dout is added. The sums are float32
    [sums, *gain's shape]: the first one, two or three of dgain, dbias and the sum of dout.
    """
    return _norm_backward_add(dy, x, mean, rms, gain, dout, sums)


@library.custom_op("mxstudy::norm_backward_add", mutates_args=())
def _norm_backward_add(
    dy: Tensor, x: Tensor, mean: Tensor | None, rms: Tensor, gain: Tensor, dout: Tensor, sums: int
) -> tuple[Tensor, Tensor]:
    dy, gain, xbar = to_dtype(dy, FP32), to_dtype(gain, FP32), normalize(center(x, mean), rms)
    dx, dgain, dbias = norm_backward(dy, xbar, rms, gain, gain, centers=mean is not None)
    assert dbias is not None
    of_dout = [to_dtype(dout, FP32).sum_to_size(gain.shape)] if sums == 3 else []
    return (dout + to_dtype(dx, x.dtype)).contiguous(), torch.stack([dgain, dbias, *of_dout][:sums])


@_norm_backward_add.register_fake
def _(
    dy: Tensor, x: Tensor, mean: Tensor | None, rms: Tensor, gain: Tensor, dout: Tensor, sums: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(sums, *gain.shape, dtype=FP32)


@_norm_backward_add.register_kernel("cuda")
def launch_cuda(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor,
    gain: Tensor,
    dout: Tensor,
    sums: int = 3,
    most_programs: int = MOST_PROGRAMS,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch both kernels: the first returns dx and partial sums over rows, the second adds these up.

    `tile`: another tile than usual, of which rows and warps are read; it may change the last bits of the sums.
    """
    from mxstudy.kernels.device.norm_backward import add_up_kernel, norm_backward_kernel

    rows, columns = x.shape[-2:]
    replicas, width = x.numel() // (rows * columns), ceil_power_of_two(columns)
    tile_rows, warps = tile_of_rows(rows, width) if tile is None else (tile.rows, tile.warps)
    check_tile("rows", tile_rows, rows)
    tiles, dx = rows // tile_rows, x.new_empty(x.shape)
    turns = -(-tiles // most_programs)
    programs = -(-tiles // turns)
    parts = x.new_empty(sums, replicas, programs, columns, dtype=FP32)
    tensors = (dy.contiguous(), x.contiguous(), None if mean is None else mean.contiguous(), rms.contiguous())
    launch(
        norm_backward_kernel,
        (programs, replicas),
        (
            *tensors,
            gain.contiguous(),
            dout.contiguous(),
            dx,
            parts,
            rows,
            0 if gain.numel() == columns else columns,
        ),
        warps,
        COLUMNS=columns,
        WIDTH=width,
        TILE_ROWS=tile_rows,
        TURNS=turns,
        SUMS=sums,
    )
    totals = x.new_empty(sums, *gain.shape, dtype=FP32)
    height = ceil_power_of_two(programs)
    tile_columns = min(width, max(16, 4096 // height))
    launch(
        add_up_kernel,
        (-(-columns // tile_columns), sums * replicas),
        (parts, totals, programs),
        4,
        COLUMNS=columns,
        TILES=height,
        TILE_COLUMNS=tile_columns,
    )
    return dx, totals


def tile_of_rows(rows: int, width: int) -> tuple[int, int]:
    """Return a tile's height and warps: a warp has 256 columns of all rows, so no sum over rows leaves the warp.

    Up to 8 warps have four rows or more, so that a program waits for its sums over columns once in four rows. With more
    warps the registers do not suffice.
    """
    warps = min(max(1, width // 256), 16)
    return min(power_of_two_in(rows), max(4 if warps <= 8 else 1, 2048 // width)), warps
