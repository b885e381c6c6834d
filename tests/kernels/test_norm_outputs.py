"""Kernels measure a norm's output as the probes' own arithmetic does, given the RMS."""

from __future__ import annotations

import pytest
import torch
from fused import BF16, FP32, every_norm, norm_inputs, normalized
from interpreter import DEVICE

from mxstudy.kernels import RowNorm
from mxstudy.kernels.norm_cast import Normed, launch_cuda
from mxstudy.kernels.norm_outputs import norm_bins, norm_mean_squares
from mxstudy.kernels.operators import UNREAD, Tile, checked_casts
from mxstudy.kernels.packing import pack
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.probes.activations import BINS, count_bins

pytestmark = pytest.mark.integration
NARROW = Tile(16, 64, 4)  # several tiles in a row
every_tile = pytest.mark.parametrize(("dtype", "tile"), [(FP32, NARROW), (BF16, None)], ids=["fp32", "bf16"])
every_cast = pytest.mark.parametrize(
    ("fmt", "cast"),
    [("E4M3", BlockCast()), ("E2M1", BlockCast(16, "floor", "away", operand_pre_round=True)), (None, BlockCast())],
    ids=["E4M3", "E2M1", "none"],
)


def expected_output(x, norm, fmt, cast, tile):
    """Return the output, float32, with the mean and RMS of the kernel that normalises and casts."""
    casts = checked_casts(x.shape, UNREAD, None, cast)
    known = pack(Normed(norm.p, norm.centers, norm.eps, False))
    *_, mean, rms = (t.cpu() for t in launch_cuda(x.to(DEVICE), None, None, None, known, casts, tile))
    y = normalized(x, mean, rms, None, None)
    return y if fmt is None else block_cast(y, fmt, -1, cast).dequantize(FP32)


@every_norm
@every_cast
@every_tile
def test_mean_squares(norm, dtype, fmt, cast, tile):
    x, _, _ = norm_inputs((70, 256), dtype)  # the last tile of rows is incomplete
    got = norm_mean_squares(x.to(DEVICE), norm, fmt, cast, tile).cpu()
    of_output = expected_output(x, norm, fmt, cast, tile).double().square().mean()
    centered = x.double() - (x.double().mean(-1, keepdim=True) if norm.centers else 0)
    square = centered.square().mean(-1)
    expected = torch.stack([of_output, (square / (square + norm.eps)).mean()])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)


@every_norm
@every_cast
@every_tile
def test_histograms(norm, dtype, fmt, cast, tile):
    x, _, _ = norm_inputs((70, 256), dtype)
    x[0, :6] = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 1e6, -1e6])
    got = norm_bins(x.to(DEVICE), norm, fmt, cast, BINS, tile).cpu()
    expected = torch.stack([count_bins(x), count_bins(expected_output(x, norm, fmt, cast, tile))])
    assert got.dtype == torch.int64
    assert got.tolist() == expected.tolist()


def test_three_axes_and_more_tiles_than_programs(monkeypatch):
    monkeypatch.setattr("mxstudy.kernels.norm_outputs.PROGRAMS", 3)
    x, _, _ = norm_inputs((5, 37, 96), BF16)
    options = RowNorm(p=2.0), "E4M3", BlockCast()
    assert norm_bins(x.to(DEVICE), *options, BINS, NARROW._replace(columns=32)).sum(1).tolist() == [x.numel()] * 2
    parts = [norm_mean_squares(part.to(DEVICE), *options).cpu() for part in x]
    torch.testing.assert_close(norm_mean_squares(x.to(DEVICE), *options).cpu(), torch.stack(parts).mean(0))


def test_what_is_not_a_number_is_counted_outermost():
    x, _, _ = norm_inputs()
    x[0, 0], x[1, 0] = torch.nan, torch.inf
    got = norm_bins(x.to(DEVICE), RowNorm(), "E4M3", BlockCast(), BINS).cpu()
    assert got.sum(1).tolist() == [x.numel()] * 2
    assert (got[0, 0] + got[0, -1]).item() == 2
