"""Both operands from one kernel have the bits that `cast_any` gives for each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import assert_same_bits
from each import each
from fused import BF16, every_dtype, norm_inputs
from interpreter import DEVICE
from torch import library

from mxstudy.kernels.cast_any import absmax_any, cast_any
from mxstudy.kernels.cast_any_both import cast_any_both, groups_of_both, launch_both
from mxstudy.kernels.operand_cast import OperandCast
from mxstudy.kernels.packing import pack
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
ROW = OperandCast("NVFP4", -1, 16, scale="E4M3", outer_scale="tensor", chain="training")
COLUMN = replace(ROW, axis=-2)
E2M1, E4M3 = replace(ROW, fmt="E2M1"), replace(COLUMN, fmt="E4M3")


def inputs(shape=(64, 96), dtype=BF16):
    """Return numbers of many sizes, with a block of zeros and one of subnormals."""
    x, _, _ = norm_inputs(shape, dtype)
    x[:16, :16] = 0
    x[16:32, :16] *= 2.0**-130
    return x


def assert_both(x, row=ROW, column=COLUMN):
    """Check that the kernel, and the operator away from GPUs, have the bits of two casts."""
    outer = absmax_any(x, row)
    expected = [cast_any(x, cast, outer=outer) for cast in (row, column)]
    kernel = launch_both(x.to(DEVICE), outer.to(DEVICE), pack(row), pack(column))
    for found in (kernel, cast_any_both(x, row, column, outer)):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one.cpu(), other)


@every_dtype
@pytest.mark.parametrize("rounding", ["even", "away"])
@pytest.mark.parametrize("pre_round", [False, True])
def test_every_rounding(dtype, rounding, pre_round):
    """One operand is rounded like this, while the other is rounded to even."""
    x = inputs(dtype=dtype)
    assert_both(x, replace(ROW, rounding=rounding, pre_round=pre_round))
    assert_both(x, column=replace(COLUMN, rounding=rounding, pre_round=pre_round))


@each("row", [16, 32, 64])
@each("column", [16, 32, 64])
@pytest.mark.parametrize("squares", [(False, False), (True, False), (False, True), (True, True)])
def test_every_block(row, column, squares):
    """Blocks and squares are whole in the tile of either cast."""
    casts = (
        replace(E2M1, block_size=row, square=squares[0]),
        replace(E4M3, block_size=column, square=squares[1]),
    )
    assert_both(inputs((128, 192)), *casts)


@each("shape", [(16, 16), (48, 80), (32, 1024), (16, 1536)])
def test_every_shape(shape):
    """Shapes are one tile, less, and several tiles beside and below one another."""
    assert_both(inputs(shape))


@each("shape", [(48, 64), (37, 50)])
def test_one_scale_for_the_whole_tensor(shape):
    """It needs no whole groups."""
    row = OperandCast("E5M2", -1, 16, scale="none", outer_scale="tensor")
    assert_both(inputs(shape), row, replace(row, axis=-2))


def test_strides():
    assert_both(inputs((96, 64)).T)


@each("row", [ROW, replace(ROW, block_size=64, square=True)])
@each("column", [COLUMN, replace(COLUMN, block_size=32), replace(COLUMN, block_size=64, square=True)])
@each("columns", [64, 192, 4096])
def test_both_tiles_are_one_part_of_x(row, column, columns):
    of_row, of_column = groups_of_both(row, column, columns)
    assert of_row.rows == of_column.rows * column.group
    assert of_row.columns * row.group == of_column.columns


@each("elements", [16, 512, 2048])
@each("warps", [1, 8])
@each("column", [COLUMN, replace(COLUMN, block_size=64, square=True)])
def test_every_tile_has_the_same_bits(elements, warps, column):
    x = inputs((64, 192))
    outer = absmax_any(x, ROW)
    given = x.to(DEVICE), outer.to(DEVICE), pack(ROW), pack(column)
    for one, other in zip(launch_both(*given, elements, warps), launch_both(*given), strict=True):
        assert_same_bits(one, other)


@each("bad", [torch.nan, torch.inf])
def test_nan_of_the_tensors_scale_is_everywhere(bad):
    x = inputs()
    x[33, 5] = bad
    assert_both(x)
    assert all(operand.isnan().all() for operand in cast_any_both(x, ROW, COLUMN, absmax_any(x, ROW)))


def test_it_is_an_operator():
    """It has a schema and fake tensors, and is traced and compiled without a break."""
    torch._dynamo.reset()
    x = inputs().to(DEVICE)
    outer = absmax_any(x, ROW)
    library.opcheck(torch.ops.mxstudy.cast_any_both, (x, outer, pack(ROW), pack(COLUMN)))
    compiled = torch.compile(lambda x, outer: cast_any_both(x * 2, ROW, COLUMN, outer * 2), fullgraph=True)
    for one, other in zip(compiled(x, outer), cast_any_both(x * 2, ROW, COLUMN, outer * 2), strict=True):
        assert_same_bits(one, other)


@each(
    ("row", "column", "message"),
    [
        (ROW, ROW, "axis: give the cast along the rows, -1, and that along the columns"),
        (ROW, replace(COLUMN, outer_scale="none"), "outer: both casts need an outer scale"),
        (ROW, replace(COLUMN, transform_size=16), "cast: no stochastic rounding, transforms"),
        (ROW, replace(COLUMN, rounding="stochastic"), "cast: no stochastic rounding, transforms"),
        (
            ROW,
            replace(COLUMN, candidates=(1.0, 1.5)),
            "cast: no stochastic rounding, transforms, candidates",
        ),
        (replace(ROW, block_size=128), COLUMN, "or blocks over 64"),
        (replace(ROW, block_size=64), COLUMN, "block_size: 64 does not divide axis -1"),
        (replace(ROW, outer_scale="row"), COLUMN, "outer_scale: 'row' is not a choice"),
    ],
)
def test_bad_input(row, column, message):
    with pytest.raises(ConfigError, match=message):
        cast_any_both(torch.ones(64, 96), row, column, torch.ones(()))
