"""Compiles SwiGLU's backward for a GPU of compute capability 9.0 that need not be there; see `ahead`."""

from __future__ import annotations

from typing import Any

from ahead import compile_ahead, print_all

from mxstudy.kernels.activation import Rounded
from mxstudy.kernels.device.activation import PHIS, activation_backward_cast_both_kernel
from mxstudy.kernels.operators import UNREAD, checked_casts, constants, tile_of_gradient
from mxstudy.numerics.cast import BlockCast

ROWS, COLUMNS = 4096, 8192
POINTERS = ("dz_ptr", "h_ptr", "row_ptr", "column_ptr", "again_ptr")


def compiled(row: str | None, column: str | None, again: str | None) -> Any:
    shape = (ROWS, COLUMNS)
    casts, of_z = (constants(checked_casts(shape, *c, BlockCast())) for c in ((row, column), (UNREAD, again)))
    tile = tile_of_gradient(*shape, casts, of_z)
    constant = {
        "PHI": PHIS["silu"][0],
        "PHI_BACKWARD": PHIS["silu"][1],
        "ACTIVATION": Rounded("silu", True, True, True),
        "COLUMNS": COLUMNS,
        "TILE": tile,
        "CAST": casts,
        "CAST_OF_Z": of_z,
    }
    unread = dict.fromkeys(["column_ptr"] if column == UNREAD else [])
    return compile_ahead(
        activation_backward_cast_both_kernel, dict.fromkeys(POINTERS, "*bf16"), constant | unread, tile.warps
    )


if __name__ == "__main__":
    print_all(compiled)
