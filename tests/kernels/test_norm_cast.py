"""Norm kernels give the RMS within 1e-6 of torch's in float64, and with its bits every bit of the operands."""

from __future__ import annotations

import itertools

import pytest
import torch
from bits import assert_same_bits
from fused import BF16, FP32, every_dtype, every_norm, norm_inputs, normalized, rms_of
from interpreter import DEVICE

from mxstudy.kernels import RowNorm, norm_cast_both
from mxstudy.kernels.norm_cast import Normed, launch_cuda
from mxstudy.kernels.operators import UNREAD, Tile, checked_casts
from mxstudy.kernels.packing import pack
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
NARROW = Tile(32, 64, 8)  # several tiles per row


def kernel(x, norm, row, column, cast, *, gain=None, bias=None, branch=None, round_output=False, tile=None):
    """Return the kernel's results as CPU tensors."""
    x, gain, bias, branch = (None if t is None else t.to(DEVICE) for t in (x, gain, bias, branch))
    known = pack(Normed(norm.p, norm.centers, norm.eps, round_output))
    return [t.cpu() for t in launch_cuda(x, branch, gain, bias, known, checked_casts(x.shape, row, column, cast), tile)]


@every_norm
@every_dtype
@pytest.mark.parametrize("tile", [NARROW, Tile(32, 256, 8)], ids=["narrow", "whole"])
def test_mean_and_rms(norm, dtype, tile):
    x, _, _ = norm_inputs(dtype=dtype)
    *_, mean, rms = kernel(x, norm, "E4M3", "E4M3", BlockCast(), tile=tile)
    expected_mean, expected_rms = rms_of(x, norm, 32)
    assert (rms / expected_rms - 1).abs().max() < 1e-6
    assert mean.shape == (rms.shape if norm.centers else (0,))
    if norm.centers:
        assert (mean - expected_mean).abs().max() < 1e-6 * x.float().abs().max()


def test_a_tile_wider_than_the_row_is_refused():
    x, _, _ = norm_inputs()
    with pytest.raises(ConfigError, match=f"tile: 512 columns do not divide {x.shape[-1]}"):
        kernel(x, RowNorm(), "E4M3", "E4M3", BlockCast(), tile=Tile(32, 512, 8))


@every_norm
@every_dtype
@pytest.mark.parametrize("affine", ["folded", "gain", "gain and bias"])
@pytest.mark.parametrize("round_output", [False, True])
def test_operands_given_mean_and_rms(norm, dtype, affine, round_output):
    x, gain, bias = norm_inputs(dtype=dtype)
    gain = None if affine == "folded" else gain
    bias = bias if affine == "gain and bias" else None
    options = {"gain": gain, "bias": bias, "round_output": round_output}
    row, column, _, mean, rms = kernel(x, norm, "E4M3", "E5M2", BlockCast(), tile=NARROW, **options)
    y = normalized(x, mean, rms, gain, bias)
    y = y.bfloat16() if round_output else y
    assert_same_bits(row, block_cast(y, "E4M3", -1, BlockCast()).dequantize(BF16))
    assert_same_bits(column, block_cast(y, "E5M2", -2, BlockCast()).dequantize(BF16))


@pytest.mark.parametrize(("row", "column"), list(itertools.product(["E2M1", None], repeat=2)))
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_formats_and_blocks(row, column, block_size):
    x, gain, _ = norm_inputs()
    cast = BlockCast(block_size, "even", "away", operand_pre_round=True)
    *operands, _, mean, rms = kernel(x, RowNorm(p=2.0), row, column, cast, gain=gain)
    y = normalized(x, mean, rms, gain, None)
    assert (rms / rms_of(x, RowNorm(p=2.0), block_size)[1] - 1).abs().max() < 1e-6
    for got, fmt, axis in zip(operands, (row, column), (-1, -2), strict=True):
        expected = y.bfloat16() if fmt is None else block_cast(y, fmt, axis, cast).dequantize(BF16)
        assert_same_bits(got, expected)


@every_dtype
@pytest.mark.parametrize("branch_dtype", [FP32, BF16])
@pytest.mark.parametrize("tile", [NARROW, None])
def test_the_sum_with_a_branch(dtype, branch_dtype, tile):
    """The sum is rounded and written, and then normalised."""
    x, gain, bias = norm_inputs(dtype=dtype)
    branch, _, _ = norm_inputs(dtype=branch_dtype, seed=1)
    options = {"gain": gain, "bias": bias, "tile": tile}
    row, column, total, mean, rms = kernel(
        x, RowNorm(centers=True), "E4M3", "E4M3", BlockCast(), branch=branch, **options
    )
    expected = (x + branch).to(dtype)
    assert_same_bits(total, expected)
    of_sum = kernel(expected, RowNorm(centers=True), "E4M3", "E4M3", BlockCast(), **options)
    for one, other in zip((row, column, mean, rms), (*of_sum[:2], *of_sum[3:]), strict=True):
        assert_same_bits(one, other)


@every_norm
@every_dtype
@pytest.mark.parametrize("columns", [96, 256])
@pytest.mark.parametrize("tile", [None, Tile(8, 32, 4), Tile(1, 32, 4)])
def test_rows_alone(norm, dtype, columns, tile):
    """No block of rows has to be whole, so a program may have any number of rows."""
    x, gain, _ = norm_inputs((39, columns), dtype)
    branch, _, _ = norm_inputs((39, columns), BF16, seed=1)
    row, column, total, mean, rms = kernel(x, norm, "E4M3", UNREAD, BlockCast(), gain=gain, branch=branch, tile=tile)
    assert column.numel() == 0
    assert_same_bits(total, (x + branch).to(dtype))
    assert (rms / rms_of(total, norm, 32)[1] - 1).abs().max() < 1e-6
    y = normalized(total, mean, rms, gain, None)
    assert_same_bits(row, block_cast(y, "E4M3", -1, BlockCast()).dequantize(BF16))


@every_norm
def test_a_row_knows_no_other(norm):
    """Neither the number of rows nor a row's position changes a bit, even if no block of rows is whole."""
    x, gain, _ = norm_inputs((96, 256))
    whole = kernel(x, norm, "E4M3", None, BlockCast(), gain=gain, tile=NARROW)
    part = kernel(x[13:60], norm, "E4M3", None, BlockCast(), gain=gain, tile=NARROW)
    for one, other in zip((whole[0], whole[1], whole[4]), (part[0], part[1], part[4]), strict=True):
        assert_same_bits(one[13:60], other)


@every_norm
def test_a_replica_of_a_stack_is_itself_alone(norm):
    """It has its own gain and bias, and a NaN in one replica stays there."""
    x, gain, bias = norm_inputs((3, 32, 128))
    x[1, 4, 5] = torch.nan
    gains, biases = (torch.stack([t.roll(r) for r in range(3)])[:, None] for t in (gain, bias))
    together = kernel(x, norm, "E4M3", "E4M3", BlockCast(), gain=gains, bias=biases)
    for r in range(3):
        alone = kernel(x[r], norm, "E4M3", "E4M3", BlockCast(), gain=gains[r, 0], bias=biases[r, 0])
        for one, other in zip(together, alone, strict=True):
            if other.numel():
                assert_same_bits(one[r], other)
    assert together[0][1].isnan().any()
    assert not together[0][[0, 2]].isnan().any()


@every_norm
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_zero_huge_tiny_or_not_finite(norm, bad):
    """The result is that of the numerics, whichever tile of the row it is in."""
    x, _, _ = norm_inputs((32, 128))
    x[3], x[9], x[4, 100], x[5, 3] = 0, -0.0, bad, bad
    x[6] *= 1e-30
    if norm.p is not None:
        x[7] *= 1e30  # their squares are infinite
    ours = kernel(x, norm, "E4M3", None, BlockCast(), tile=NARROW)
    theirs = norm_cast_both(x, None, norm, "E4M3", None, BlockCast())
    assert torch.equal(ours[0].isnan(), theirs.row.isnan())
    assert torch.allclose(ours[4], theirs.rms, rtol=1e-6, atol=0, equal_nan=True)
    good = ours[0].isfinite().all(-1)
    y = normalized(x, ours[3], ours[4], None, None)
    assert_same_bits(ours[0], block_cast(y, "E4M3", -1, BlockCast()).dequantize(BF16))
    assert good.sum() == 30
    assert (ours[0][[3, 9]] == 0).all()


def test_wide_rows():
    for columns in (96, 768, 4096):
        x, _, _ = norm_inputs((16, columns), BF16)
        row, _, _, _, rms = kernel(x, RowNorm(p=2.0), "E4M3", "E4M3", BlockCast(16))
        assert (rms / rms_of(x, RowNorm(p=2.0), 16)[1] - 1).abs().max() < 1e-6
        y = normalized(x, torch.empty(0), rms, None, None)
        assert_same_bits(row, block_cast(y, "E4M3", -1, BlockCast(16)).dequantize(BF16))
