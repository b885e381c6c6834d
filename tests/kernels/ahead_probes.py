"""Compile the kernels of probes for a GPU of compute capability 9.0 that need not be there. See `ahead`."""

from __future__ import annotations

from typing import Any

from ahead import compile_ahead, print_all

from mxstudy.kernels.device.cast_counts import cast_counts_kernel
from mxstudy.kernels.device.norm_outputs import norm_bins_kernel, norm_squares_kernel
from mxstudy.kernels.norm_cast import RowNorm, norm_arguments, row_tile
from mxstudy.kernels.operators import FORMATS, checked_casts, constants, tile_of
from mxstudy.numerics.cast import BlockCast
from mxstudy.probes.activations import BINS


def compiled(what: str, columns: int, fmt: str | None, p: float | None, axis: int) -> Any:
    shape = 4096, columns
    casts = constants(checked_casts(shape, fmt if axis == -1 else None, fmt if axis == -2 else None, BlockCast()))
    if what == "counts":
        tile = tile_of(*shape, casts.block)
        known = {"AXIS": axis + 2, "COLUMNS": columns, "LARGEST": FORMATS[fmt].max, "TILE": tile, "CAST": casts}
        return compile_ahead(cast_counts_kernel, {"x_ptr": "*bf16", "counts_ptr": "*fp64"}, known, tile.warps)
    tile = row_tile(columns)
    known = norm_arguments(RowNorm(p), casts.block) | {"COLUMNS": columns, "TILE": tile, "CAST": casts}
    if what == "squares":
        types = {"x_ptr": "*bf16", "squares_ptr": "*fp32", "rows": "i32"}
        return compile_ahead(norm_squares_kernel, types, known, tile.warps)
    types = {"x_ptr": "*bf16", "counts_ptr": "*i32", "rows": "i32"}
    return compile_ahead(norm_bins_kernel, types, known | {"BINS": BINS, "TURNS": 4}, tile.warps)


if __name__ == "__main__":
    print_all(compiled)
