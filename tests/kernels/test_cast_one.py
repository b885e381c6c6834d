"""The kernel prepares one operand of a weight or of a norm's input, with the bits of the same computed step by step."""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from fused import BF16, FP32, every_dtype, norm_inputs, normalized
from interpreter import DEVICE, every_format

from mxstudy.kernels import cast_one
from mxstudy.kernels.cast_one import launch_cuda
from mxstudy.kernels.operators import Tile, checked_casts
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
every_axis = pytest.mark.parametrize("axis", [-2, -1], ids=["columns", "rows"])


def kernel(x, fmt, axis, cast, mean=None, rms=None, gain=None, bias=None, round_first=False, tile=None):
    """Return the kernel's result as a CPU tensor, which must equal that of the operator away from GPUs."""
    of = {"mean": mean, "rms": rms, "gain": gain, "bias": bias}
    there = (None if t is None else t.to(DEVICE) for t in of.values())
    casts = checked_casts(x.shape, fmt if axis == -1 else None, fmt if axis == -2 else None, cast)
    got = launch_cuda(x.to(DEVICE), *there, None, round_first, axis, casts, tile).cpu()
    assert_same_bits(got, cast_one(x.contiguous(), fmt, axis, cast, **of, round_first=round_first))
    return got


def operand(y, fmt, axis, cast):
    return y.to(BF16) if fmt is None else block_cast(y, fmt, axis, cast).dequantize(BF16)


@every_format
@every_axis
@every_dtype
def test_a_tensor_as_it_is(fmt, axis, dtype):
    x, _, _ = norm_inputs(dtype=dtype)
    cast = BlockCast(16, "even", "away", operand_pre_round=True)
    assert_same_bits(kernel(x, fmt, axis, cast), operand(x, fmt, axis, cast))


@every_axis
@every_dtype
@pytest.mark.parametrize("fmt", ["E4M3", None])
@pytest.mark.parametrize("folded", [False, True])
def test_a_weight(axis, dtype, fmt, folded):
    """The weight is rounded to bf16. Its product with a gain in FP32 goes unrounded into the cast."""
    weight, gain, _ = norm_inputs((96, 256), dtype)
    gain = gain.to(BF16) if folded else None
    y = weight.to(BF16).to(FP32)
    y = y * gain.to(FP32) if folded else y
    assert_same_bits(
        kernel(weight, fmt, axis, BlockCast(), gain=gain, round_first=True), operand(y, fmt, axis, BlockCast())
    )


@every_axis
@every_dtype
@pytest.mark.parametrize("centers", [False, True])
@pytest.mark.parametrize("affine", ["none", "gain", "gain and bias"])
def test_a_norms_output(axis, dtype, centers, affine):
    x, gain, bias = norm_inputs(dtype=dtype)
    mean = x.float().mean(-1, keepdim=True) if centers else None
    rms = x.float().square().mean(-1, keepdim=True).sqrt()
    gain = None if affine == "none" else gain.to(BF16)
    bias = bias.to(BF16) if affine == "gain and bias" else None
    y = normalized(x, torch.empty(0) if mean is None else mean, rms, gain, bias)
    for tile in (None, Tile(32, 32, 4)):
        got = kernel(x, "E4M3", axis, BlockCast(), mean, rms, gain, bias, tile=tile)
        assert_same_bits(got, operand(y, "E4M3", axis, BlockCast()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_block(bad):
    x, _, _ = norm_inputs((64, 96))
    x[33, 5] = bad
    assert kernel(x, "E4M3", -2, BlockCast()).isnan().nonzero().tolist() == [[row, 5] for row in range(32, 64)]


def test_rows_of_any_number_and_strides():
    x, _, _ = norm_inputs((96, 37))
    assert_same_bits(kernel(x.T, "E4M3", -1, BlockCast()), operand(x.T, "E4M3", -1, BlockCast()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": torch.ones(64)}, "bias: it is added after the gain"),
        ({"fmt": "NVFP4"}, "NVFP4 has E4M3 scales"),
        ({"x": torch.ones(48, 64)}, "does not divide axis -2"),
        ({"axis": 1}, "axis: 1 is not an operand's axis; take -1"),
        ({"axis": 0, "fmt": None}, "axis: 0 is not an operand's axis"),
        ({"cast": BlockCast(rounding="nearest")}, "rounding: nearest has no kernel"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ConfigError, match=message):
        cast_one(**{"x": torch.ones(64, 64), "fmt": "E4M3", "axis": -2, "cast": BlockCast()} | options)
