"""Kernels that cast have every bit of `quantize(...).dequantize(torch.bfloat16)`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from bits import assert_same_bits, every_rounding, every_rule
from blocks import every_kind
from interpreter import DEVICE, every_format

from mxstudy.kernels import operators as operands
from mxstudy.kernels.cast_both import launch_cuda
from mxstudy.kernels.operators import Tile, checked_casts
from mxstudy.numerics import quantize
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.formats import FORMATS

pytestmark = pytest.mark.integration


def kernel(x, row, column, cast, tile=None):
    """Return the kernel's results as CPU tensors."""
    return [operand.cpu() for operand in launch_cuda(x.to(DEVICE), checked_casts(x.shape, row, column, cast), tile)]


def regimes(fmt: str, block_size: int = 32) -> torch.Tensor:
    """Return the blocks of `every_kind` in the rows of one half and in the columns of the other, float32 [256, 256]."""
    blocks = torch.from_numpy(every_kind(fmt, block_size, per_kind=128 * 256 // block_size // 14))
    half = torch.zeros(128 * 256)
    half[: blocks.numel()] = blocks.flatten()
    return torch.cat((half.view(128, 256), half.view(256, 128).T))


# It is one program, because each program takes the interpreter long. A GPU's compiler would take minutes for such a
# tile.
WHOLE, LONG, WIDE = (None,) * 3 if DEVICE == "cuda" else (Tile(256, 256, 4), Tile(4096, 32, 4), Tile(32, 4096, 4))


@every_format
@every_rule
@every_rounding
@pytest.mark.parametrize("pre_round", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_operands(fmt, rule, rounding, pre_round, dtype):
    """NaN, infinities, zeros, subnormals and all of `blocks` lie along the rows and along the columns."""
    x, cast = regimes(fmt).to(dtype), BlockCast(32, rule, rounding, pre_round)
    row, column = kernel(x, fmt, fmt, cast, WHOLE)
    assert_same_bits(row, block_cast(x, fmt, -1, cast).dequantize(torch.bfloat16))
    assert_same_bits(column, block_cast(x, fmt, -2, cast).dequantize(torch.bfloat16))


@every_rule
@pytest.mark.parametrize("fmt", ["E4M3", "E5M2"])
def test_gpus_without_conversions_to_fp8(fmt, rule, monkeypatch):
    x, cast = regimes(fmt), BlockCast(32, rule)
    monkeypatch.setattr(operands, "converted", lambda fmt: None)
    row, _ = kernel(x, fmt, fmt, cast, WHOLE)
    assert_same_bits(row, block_cast(x, fmt, -1, cast).dequantize(torch.bfloat16))


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize(("row", "column"), [*itertools.permutations(["E4M3", "E5M2", None], 2), (None, None)])
def test_each_operand_has_its_own_format_or_none(block_size, row, column):
    x = regimes("E4M3", block_size)
    for fmt, axis, got in zip((row, column), (-1, -2), kernel(x, row, column, BlockCast(block_size)), strict=True):
        expected = x.bfloat16() if fmt is None else quantize(x, fmt, block_size, axis).dequantize(torch.bfloat16)
        assert_same_bits(got, expected)


@every_format
@every_rule
@every_rounding
def test_every_mantissa(fmt, rule, rounding):
    """The test has the upper 8 bits of mantissa, and neighbours, in every binade of the format, under 2^emax."""
    element = FORMATS[fmt]
    mantissas = torch.arange(2**8, dtype=torch.int32) << 15
    mantissas = torch.stack((mantissas - 1, mantissas, mantissas + 1), dim=1).flatten()
    exponents = torch.arange(element.emin - element.mantissa_bits - 2, element.emax).int() + 127
    numbers = ((exponents[:, None] << 23) + mantissas).view(torch.float32).flatten()
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 31))
    blocks = torch.cat((numbers.view(-1, 31), torch.full((len(numbers) // 31, 1), 2.0**element.emax)), dim=1)
    blocks *= torch.tensor([1.0, -1.0]).repeat(16)
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, -len(blocks) % 32))
    cast = BlockCast(32, rule, rounding)
    (row, _) = kernel(blocks, fmt, None, cast, Tile(32, 32, 4))
    assert_same_bits(row, block_cast(blocks, fmt, -1, cast).dequantize(torch.bfloat16))
    (_, column) = kernel(blocks.T.contiguous(), None, fmt, cast, Tile(32, 32, 4))
    assert_same_bits(column.T, row)


@pytest.mark.parametrize(("fmt", "rule"), [("E4M3", "rceil"), ("E2M1", "floor")])
def test_every_bf16_number(fmt, rule):
    """Every bf16 number is cast beside a largest number from its own binade up to where it is lost.

    bf16 is cast in another way than float32.
    """
    magnitudes = torch.arange(1, 0x7F80).to(torch.int16).view(torch.bfloat16)
    numbers = torch.nn.functional.pad(magnitudes, (0, -len(magnitudes) % 31)).view(-1, 31).repeat(3, 1)
    exponent = numbers.float().amax(1, keepdim=True).frexp().exponent
    binades = torch.tensor([0, 3, 18]).repeat_interleave(len(numbers) // 3)[:, None]
    largest = torch.ldexp(torch.tensor(1.75), (exponent - 1 + binades).clamp(max=127))
    blocks = torch.cat((numbers * torch.tensor([1.0, -1.0] * 16)[:31], largest), dim=1).bfloat16()
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, 4096 - len(blocks)))
    expected = block_cast(blocks, fmt, -1, BlockCast(32, rule)).dequantize(torch.bfloat16)
    row, _ = kernel(blocks, fmt, None, BlockCast(32, rule), LONG)
    assert_same_bits(row, expected)
    _, column = kernel(blocks.T.contiguous(), None, fmt, BlockCast(32, rule), WIDE)
    assert_same_bits(column.T, expected)


def test_columns_alone_may_be_of_any_number():
    x = torch.randn(64, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    row, column = kernel(x, None, "E4M3", BlockCast())
    assert_same_bits(row, x)
    assert_same_bits(column, quantize(x, "E4M3", axis=-2).dequantize(torch.bfloat16))


def test_a_gpu_that_has_no_arithmetic_for_pairs(monkeypatch):
    x = regimes("E4M3").bfloat16()
    expected = kernel(x, "E4M3", "E4M3", BlockCast(), WHOLE)
    monkeypatch.setattr(operands, "is_capable_of", lambda *_: False)
    operands.constants.cache_clear()
    found = kernel(x, "E4M3", "E4M3", BlockCast(), WHOLE)
    assert not operands.constants(operands.checked_casts(x.shape, "E4M3", "E4M3", BlockCast())).pairs
    operands.constants.cache_clear()
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("shape", [(5, 64, 96), (2, 32, 160), (160, 32), (96, 1024), (32, 4096)])
def test_usual_tiles_and_stacks(shape):
    """A stack has its replicas one after another, in a size whose tiles are powers of two that divide it."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    row, column = kernel(x, "E4M3", "E2M3", BlockCast())
    assert_same_bits(row, quantize(x, "E4M3").dequantize(torch.bfloat16))
    assert_same_bits(column, quantize(x, "E2M3", axis=-2).dequantize(torch.bfloat16))


def test_rows_alone_may_be_of_any_number():
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    row, column = kernel(x, "E4M3", None, BlockCast())
    assert_same_bits(row, quantize(x, "E4M3").dequantize(torch.bfloat16))
    assert_same_bits(column, x.bfloat16())


@pytest.mark.parametrize("tile", [Tile(16, 16, 4), Tile(32, 64, 4), Tile(64, 32, 4)])
def test_no_bit_depends_on_the_tile(tile):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32))
    for one, other in zip(
        kernel(x, "E4M3", "E5M2", BlockCast(16), tile), kernel(x, "E4M3", "E5M2", BlockCast(16)), strict=True
    ):
        assert_same_bits(one, other)
