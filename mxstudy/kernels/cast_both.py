"""Cast a tensor for both of its contractions."""

from __future__ import annotations

from torch import Tensor, library

from mxstudy.kernels.operators import (
    Tile,
    argument_of,
    both,
    checked_casts,
    constants,
    empty_both,
    launch,
    tile_of,
)
from mxstudy.numerics.cast import BlockCast


def cast_both(x: Tensor, row: str | None, column: str | None, cast: BlockCast) -> tuple[Tensor, Tensor]:
    """Cast x [..., rows, columns] bf16 or fp32 for the row-wise and the column-wise contraction: two bf16 operands.

    Both have x's shape. The first is in format `row` with blocks along the last axis, the second in format `column`
    with blocks along the one before it; without a format x is only rounded. Raises ConfigError as `checked_casts` does.
    """
    return cast_both_with(x, checked_casts(x.shape, row, column, cast))


def cast_both_with(x: Tensor, casts: str) -> tuple[Tensor, Tensor]:
    """Cast as `cast_both` does, with casts that `checked_casts` has already checked and packed."""
    return _cast_both(x, casts)


@library.custom_op("mxstudy::cast_both", mutates_args=())
def _cast_both(x: Tensor, casts: str) -> tuple[Tensor, Tensor]:
    return both(x, casts)


@_cast_both.register_fake
def _(x: Tensor, casts: str) -> tuple[Tensor, Tensor]:
    return empty_both(x, casts)


@_cast_both.register_kernel("cuda")
def launch_cuda(x: Tensor, casts: str, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernel. `tile`: a tile other than the usual one, with whole blocks.

    The result does not depend on the tile.
    """
    from mxstudy.kernels.device.cast_both import cast_both_kernel

    x = x.contiguous()
    operands, columns, known = empty_both(x, casts), x.shape[-1], constants(casts)
    tile = tile or tile_of(x.numel() // columns, columns, known.block)
    launch(
        cast_both_kernel,
        (x.numel() // (tile.rows * tile.columns),),
        (x, *map(argument_of, operands)),
        tile.warps,
        COLUMNS=columns,
        TILE=tile,
        CAST=known,
    )
    return operands
