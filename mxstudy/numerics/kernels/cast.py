"""Both operands of a tensor."""

from __future__ import annotations

from torch import Tensor, library

from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.kernels.operands import (
    Tile,
    both,
    constants,
    empty_both,
    launch,
    settings,
    tile_of,
    written,
)


def cast_both(x: Tensor, row: str | None, column: str | None, cast: BlockCast) -> tuple[Tensor, Tensor]:
    """x [..., rows, columns] bf16 or fp32 -> what the row-wise and the column-wise contraction read, bf16, x's shape.

    Of format `row` in blocks along the columns' axis, of format `column` in blocks along that of the rows; without a
    format x is only rounded. Raises ConfigError as `settings` does.
    """
    return cast_both_with(x, settings(x.shape, row, column, cast))


def cast_both_with(x: Tensor, casts: str) -> tuple[Tensor, Tensor]:
    """The same, with what `settings` has found to be in order."""
    return _cast_both(x, casts)


@library.custom_op("mxstudy::cast_both", mutates_args=())
def _cast_both(x: Tensor, casts: str) -> tuple[Tensor, Tensor]:
    return both(x, casts)


@_cast_both.register_fake
def _(x: Tensor, casts: str) -> tuple[Tensor, Tensor]:
    return empty_both(x, casts)


@_cast_both.register_kernel("cuda")
def run(x: Tensor, casts: str, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """`tile`: another one than the usual, with blocks whole in it; no bit depends on it."""
    from mxstudy.numerics.kernels.device.cast import cast_both_kernel

    x = x.contiguous()
    operands, columns, known = empty_both(x, casts), x.shape[-1], constants(casts)
    tile = tile or tile_of(x.numel() // columns, columns, known.block, elements=2048)
    launch(
        cast_both_kernel,
        (x.numel() // (tile.rows * tile.columns),),
        (x, *map(written, operands)),
        tile.warps,
        COLUMNS=columns,
        TILE=tile,
        CAST=known,
    )
    return operands
