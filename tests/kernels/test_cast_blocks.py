"""The kernel's elements and FP32 block scales have the bits of the numerics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import assert_same_bits
from blocks import every_kind
from fused import BF16, FP32, every_dtype, norm_inputs, normalized
from interpreter import DEVICE, every_format
from torch import library

from mxstudy.kernels.cast_blocks import cast_blocks, launch_cuda
from mxstudy.kernels.operand_cast import KERNEL_BLOCKS, KERNEL_ROUNDINGS, OperandCast
from mxstudy.kernels.packing import pack
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.random_bits import Draws, random_signs, stream_key
from mxstudy.numerics.transforms import hadamard
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
every_axis = pytest.mark.parametrize("axis", [-2, -1], ids=["columns", "rows"])
DRAWS = Draws(torch.tensor(stream_key(3, "layer/dgrad_dh")), torch.tensor([5, 2**32 - 3]))
ROWS = OperandCast("E4M3", -1, 128, scale="FP32")
FP8_BLOCKWISE = {
    "forward_x": ROWS,
    "forward_w": replace(ROWS, square=True, round_first=True),
    "dgrad_dh": ROWS,
    "dgrad_w": replace(ROWS, axis=-2, square=True, round_first=True),
    "wgrad_dh": replace(ROWS, axis=-2),
    "wgrad_x": replace(ROWS, axis=-2),
}


def assert_kernel(x, cast, y=None, **given):
    """Check the kernel's elements and scales against the numerics' of y (or x).

    The operator away from GPUs must give the same.
    """
    of = dict.fromkeys(("mean", "rms", "gain", "bias", "signs")) | given
    key, place = DRAWS[:2] if cast.draws else (None, None)
    there = [None if t is None else t.to(DEVICE) for t in (*of.values(), key, place)]
    quantized = quantize_as(x if y is None else y, cast.as_cast(), cast.axis, draws=DRAWS)
    want = quantized.values, quantized.block_scales_along(cast.axis % 2)
    for got in (launch_cuda(x.to(DEVICE), *there, None, pack(cast)), cast_blocks(x, cast, **given, draws=DRAWS)):
        assert got[0].dtype == BF16
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one.cpu(), other)
    return want


def numbers(shape=(128, 256), dtype=FP32, seed=0):
    """Return numbers of many sizes, with whole blocks of zeros, of subnormals and of the largest numbers."""
    x, _, _ = norm_inputs(shape, dtype, seed)
    x[:16, :128] = 0
    x[16:32, :128] *= 2.0**-130
    x[32:48, :128] *= 2.0**120
    return x


@pytest.mark.parametrize("name", FP8_BLOCKWISE)
@every_dtype
@pytest.mark.parametrize("shape", [(128, 256), (384, 128)])
def test_every_operand_of_fp8_blockwise(name, dtype, shape):
    cast = FP8_BLOCKWISE[name]
    x = numbers(shape, dtype)
    assert_kernel(x, cast, x.to(BF16) if cast.round_first else x)


@every_format
@every_axis
@pytest.mark.parametrize("rounding", KERNEL_ROUNDINGS)
def test_every_format_and_rounding(fmt, axis, rounding):
    """The scale is absmax / largest element, rounded once, for the largest element of every format."""
    assert_kernel(numbers(), OperandCast(fmt, axis, 128, rounding=rounding, scale="FP32"))


@every_axis
@pytest.mark.parametrize("block_size", KERNEL_BLOCKS)
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("pre_round", [False, True])
def test_every_block(axis, block_size, square, pre_round):
    cast = OperandCast("E4M3", axis, block_size, square, pre_round=pre_round, scale="FP32")
    assert_kernel(numbers((256, 128)), cast)


@pytest.mark.parametrize(
    "largest", [0.0, 2.0**-149, 2.0**-126, 448 * 2.0**-126, 449 * 2.0**-126, 1e-36, 3.4e38, torch.inf, torch.nan]
)
@pytest.mark.parametrize("square", [False, True])
def test_the_ends_of_fp32(largest, square):
    """A scale is at least 2^-126. Where absmax is not finite, and nowhere else, scale and elements are NaN."""
    x = torch.zeros(256, 256)
    x[:, :128] = norm_inputs((256, 128), FP32)[0].clamp(-1, 1) * (min(largest, 1.0) if largest == largest else 1.0)
    x[:128, 5] = largest
    for axis in (-1, -2):
        elements, scales = assert_kernel(x, replace(ROWS, axis=axis, square=square))
        assert elements.isnan().any() == scales.isnan().any() == (not largest < torch.inf)
        assert not elements[128:].isnan().any()
        assert scales.nan_to_num(1.0).min() == 2.0**-126


@every_format
@every_axis
def test_regimes_of_numbers(fmt, axis):
    blocks = torch.from_numpy(every_kind(fmt, 128, per_kind=4)).flatten()
    x = blocks[: len(blocks) // 2048 * 2048].view(-1, 128)
    assert_kernel(x if axis == -1 else x.T.contiguous(), OperandCast(fmt, axis, 128, scale="FP32"))


@every_axis
@pytest.mark.parametrize("bits", [24, 8])
def test_quotients_that_are_ties_of_the_elements_grid(axis, bits):
    """Quotients that are ties are rounded as the numerics round them.

    The numbers are products of scales and midpoints between elements: a quotient off by one bit would change an
    element.
    """
    generator = torch.Generator().manual_seed(0)
    scales = (1 + torch.randint(0, 2**23, (64, 1), generator=generator) * 2.0**-23) * 2.0 ** torch.arange(-32, 32)[
        :, None
    ]
    middles = (16.5 + torch.arange(127) % 15) * 2.0 ** (torch.arange(127) % 8 - 9)
    x = torch.cat([scales * 448, scales * middles], 1)
    x = x if axis == -1 else x.T.contiguous()
    assert_kernel(x, replace(ROWS, axis=axis))
    assert_kernel(x, replace(ROWS, axis=axis, rounding="stochastic", random_bits=bits))


@every_axis
@pytest.mark.parametrize("centers", [False, True])
def test_a_norms_output_and_a_folded_weight(axis, centers):
    x, gain, bias = norm_inputs((37, 128) if axis == -1 else (128, 37))
    mean = x.mean(-1, keepdim=True) if centers else None
    gain, bias, rms = gain.to(BF16), bias.to(BF16), x.square().mean(-1, keepdim=True).sqrt()
    y = normalized(x, torch.empty(0) if mean is None else mean, rms, gain, bias)
    cast = replace(ROWS, axis=axis)
    assert_kernel(x, cast, y, mean=mean, rms=rms, gain=gain, bias=bias)
    assert_kernel(x, replace(cast, round_first=True), x.to(BF16).float() * gain.float(), gain=gain)


@every_axis
@pytest.mark.parametrize(("size", "block_size"), [(16, 128), (128, 128), (64, 16)])
def test_a_transforms_output(axis, size, block_size):
    x, signs = numbers((128, 128), BF16), random_signs(DRAWS, size)
    cast = OperandCast("E4M3", axis, block_size, transform_size=size, scale="FP32")
    assert_kernel(x, cast, hadamard(x, size, signs, axis=axis), signs=signs)


@every_axis
@pytest.mark.parametrize("square", [False, True])
def test_incomplete_blocks_are_filled_with_zeros(axis, square):
    x = numbers((131, 200))
    cast = replace(ROWS, axis=axis, square=square, pad=True)
    assert_kernel(x, cast)
    with pytest.raises(ConfigError, match=f"block_size: 128 does not divide axis {-2 if square else axis} of shape"):
        cast_blocks(x, replace(cast, pad=False))


def test_other_scales_are_part_of_the_operand():
    with pytest.raises(ConfigError, match="scale: E8M0 scales are part of the operand; call cast_any"):
        cast_blocks(torch.ones(64, 64), OperandCast("E4M3"))


@pytest.mark.parametrize("cast", FP8_BLOCKWISE.values(), ids=FP8_BLOCKWISE)
def test_is_an_operator(cast):
    x = numbers((128, 256))
    library.opcheck(torch.ops.mxstudy.cast_blocks, (x, *(None,) * 8, pack(cast)))
