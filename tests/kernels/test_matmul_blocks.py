"""The product of operands with FP32 block scales has every bit.

Sums within a block are exact in these tests.
"""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from interpreter import DEVICE
from torch import library

from mxstudy.kernels import matmul_blocks as in_one
from mxstudy.kernels.matmul_blocks import launch_cuda
from mxstudy.numerics.gemms import Operand, gemm

pytestmark = pytest.mark.integration
BF16 = torch.bfloat16


def operand(rows, inner, size, scaled, seed):
    """Return small integers, with block scales of any significand."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-15, 16, (rows, inner), generator=generator).to(BF16)
    scales = torch.rand(rows, -(-inner // size), generator=generator) + 2.0**-3
    return Operand(values, None, scales if scaled else None, size if scaled else 0)


def launched(a, b, scale=None):
    there = (None if t is None else t.to(DEVICE) for t in (a.values, b.values, a.block_scales, b.block_scales, scale))
    return launch_cuda(*there, a.block_size or b.block_size).cpu()


def wanted(a, b, scale=None):
    a, b = (Operand(o.values.float(), None, o.block_scales, o.block_size) for o in (a, b))
    return gemm(Operand(a.values, scale, a.block_scales, a.block_size), b, BF16)


@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(128, 384, 256), (64, 128, 64), (70, 200, 33), (1, 128, 200), (1536, 128, 704)]
)
@pytest.mark.parametrize("scaled", [(True, True), (True, False), (False, True)], ids=str)
def test_is_the_sum_of_scaled_products(rows, inner, columns, scaled):
    """Tiles and blocks are whole or incomplete. Only the last shape has enough tiles to use large ones."""
    a = operand(rows, inner, 128, scaled[0], 0)
    b = operand(columns, inner, 128, scaled[1], 1).T
    assert_same_bits(launched(a, b), wanted(a, b))
    assert_same_bits(in_one(a, b), wanted(a, b))


@pytest.mark.parametrize("size", [16, 32, 64])
def test_smaller_blocks_and_a_scale_of_the_whole_tensor(size):
    a, b, scale = operand(64, 192, size, True, 0), operand(96, 192, size, True, 1).T, torch.tensor(0.3)
    assert_same_bits(launched(a, b, scale), wanted(a, b, scale))
    whole = Operand(a.values, scale, a.block_scales, size)
    assert_same_bits(in_one(whole, b), wanted(a, b, scale))


def test_matrices_as_they_lie_in_memory():
    """wgrad's operands are cast along the tokens: both matrices and their scales are transposed."""
    a, b = operand(128, 256, 128, True, 0), operand(64, 256, 128, True, 1)
    want = wanted(a, b.T)
    a, b = (Operand(o.values.T.contiguous().T, None, o.block_scales.T.contiguous().T, 128) for o in (a, b))
    assert_same_bits(launched(a, b.T), want)


def test_nan_stays_in_its_row():
    a, b = operand(128, 256, 128, True, 0), operand(64, 256, 128, True, 1).T
    a.block_scales[3, 1] = torch.nan
    got = launched(a, b)
    assert got.isnan().any(1).nonzero().tolist() == [[3]]
    assert_same_bits(got, wanted(a, b))


def test_is_an_operator():
    a, b = operand(64, 256, 128, True, 0), operand(32, 256, 128, True, 1).T
    library.opcheck(torch.ops.mxstudy.matmul_blocks, (a.values, b.values, a.block_scales, b.block_scales, None, 128))
