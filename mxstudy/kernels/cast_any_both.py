"""Cast a tensor for both of its contractions, under an outer scale, in one kernel that reads the tensor once.

It has the casts of `cast_any` but for transforms, random words and a choice of scales, which would need more registers
than two casts have.
"""

from __future__ import annotations

from torch import Tensor, library

from mxstudy.kernels.cast_any import cast_any, tiles_of
from mxstudy.kernels.operand_cast import Groups, OperandCast, checked_cast, compiled_cast, incomplete_axis
from mxstudy.kernels.operators import BF16, BLOCK_SIZES, launch, power_of_two_in
from mxstudy.kernels.packing import unpack
from mxstudy.reader import require

TILE_ELEMENTS, WARPS = 2048, 2


def has_both(cast: OperandCast) -> bool:
    """Return whether the kernel can make such an operand beside another: plainly rounded, in small blocks."""
    return not cast.draws and not cast.chooses and cast.transform_size is None and cast.block_size in BLOCK_SIZES


def cast_any_both(x: Tensor, row: OperandCast, column: OperandCast, outer: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operands of x along the rows and along the columns, each with the bits of `cast_any`.

    `outer`: the absmax of x, for both. Raises ConfigError where `has_both` is false, and as `cast_any`.
    """
    require((row.axis, column.axis) == (-1, -2), "axis: give the cast along the rows, -1, and that along the columns")
    for cast in (row, column):
        require(
            has_both(cast), "cast: no stochastic rounding, transforms, candidates or blocks over 64 here; call cast_any"
        )
        checked_cast(x, cast)
        require(cast.has_outer, "outer: both casts need an outer scale")
    return _cast_any_both(x, outer, row.packed, column.packed)


@library.custom_op("mxstudy::cast_any_both", mutates_args=())
def _cast_any_both(x: Tensor, outer: Tensor, row: str, column: str) -> tuple[Tensor, Tensor]:
    return one_after_the_other(x, outer, row, column)


def one_after_the_other(x: Tensor, outer: Tensor, row: str, column: str) -> tuple[Tensor, Tensor]:
    of_row, of_column = (cast_any(x, unpack(OperandCast, packed), outer=outer) for packed in (row, column))
    return of_row, of_column


@_cast_any_both.register_fake
def _(x: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=BF16), x.new_empty(x.shape, dtype=BF16)


@_cast_any_both.register_kernel("cuda")
def launch_both(
    x: Tensor, outer: Tensor, row: str, column: str, elements: int = TILE_ELEMENTS, warps: int = WARPS
) -> tuple[Tensor, Tensor]:
    """Launch the kernel. The result does not depend on the elements and the warps of a tile."""
    from mxstudy.kernels.device.cast_any import cast_any_both_kernel

    x, columns = x.contiguous(), x.shape[1]
    casts = unpack(OperandCast, row), unpack(OperandCast, column)
    if any(incomplete_axis(x, cast) is not None for cast in casts):
        return one_after_the_other(x, outer, row, column)
    tiles = groups_of_both(*casts, columns, elements, warps)
    of_row, of_column = (compiled_cast(cast, columns, groups) for cast, groups in zip(casts, tiles, strict=True))
    results = x.new_empty(x.shape, dtype=BF16), x.new_empty(x.shape, dtype=BF16)
    launch(
        cast_any_both_kernel,
        (tiles_of(x, casts[0], of_row),),
        (x, outer, *results, x.shape[0]),
        of_row.groups.warps,
        ROW=of_row,
        COLUMN=of_column,
    )
    return results


def groups_of_both(
    row: OperandCast, column: OperandCast, columns: int, elements: int = TILE_ELEMENTS, warps: int = WARPS
) -> tuple[Groups, Groups]:
    """Return the groups of both casts in one tile of x, with whole groups and whole square blocks of both."""
    height = max(column.group, row.block_size if row.square else 1)
    least = max(row.group, column.block_size if column.square else 1) // row.group
    beside = min(power_of_two_in(columns // row.group), max(least, elements // (height * row.group)))
    return Groups(height, beside, warps), Groups(height // column.group, beside * row.group, warps)
