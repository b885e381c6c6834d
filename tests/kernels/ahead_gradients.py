"""Compile SwiGLU's backward and the rotation of heads for a GPU of compute capability 9.0, as `ahead` does."""

from __future__ import annotations

from typing import Any

from ahead import compile_ahead, print_all

from mxstudy.kernels.activation import Rounded
from mxstudy.kernels.device.activation import PHIS, activation_backward_cast_both_kernel
from mxstudy.kernels.device.heads import heads_cast_both_kernel
from mxstudy.kernels.heads import Part, tile_of_heads
from mxstudy.kernels.operators import UNREAD, checked_casts, constants, tile_of_gradient
from mxstudy.numerics.cast import BlockCast

ROWS, COLUMNS = 4096, 8192
POINTERS = ("dz_ptr", "h_ptr", "row_ptr", "column_ptr", "again_ptr")


def compiled(what: str, row: str | None, column: str | None) -> Any:
    return {"swiglu": swiglu, "heads": heads}[what](row, column)


def heads(row: str | None, column: str | None) -> Any:
    """Return the layout of llama_1b's queries: 32 heads of 64 features, in rows of 3,072."""
    casts = constants(checked_casts((ROWS, 3072), row, column, BlockCast()))
    tile = tile_of_heads(ROWS, 32, casts)
    part = Part(2048, 0, 3072, 32, 32, 2 if row else 8, back=True)
    types = {"x_ptr": "*bf16", "row_ptr": "*bf16", "column_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    unread = dict.fromkeys(["column_ptr"] if column == UNREAD else [])
    constant = {"PART": part, "TILE": tile, "CAST": casts} | unread
    return compile_ahead(heads_cast_both_kernel, types | {"rows": "i32", "positions": "i32"}, constant, tile.warps)


def swiglu(row: str | None, column: str | None) -> Any:
    shape, again = (ROWS, COLUMNS), row
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
