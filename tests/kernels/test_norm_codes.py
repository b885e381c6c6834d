"""Norm and cast to codes give the RMS within 1e-6 of torch's in float64, and with its bits every code and scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bits import assert_same_bits, every_rounding, every_rule
from fused import BF16, norm_inputs, rms_of
from interpreter import DEVICE, fused

from mxstudy.kernels import RowNorm, norm_codes
from mxstudy.kernels.norm_codes import CODED, MAX_COLUMNS, RowTile, encoding, launch_cuda, row_tile
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.norm_linear import normalize, rms_coefficient, rms_estimate, rms_exact

pytestmark = pytest.mark.integration

NORMS = [RowNorm(), RowNorm(p=2.0), RowNorm(p=1.0), RowNorm(p=0.7)]
every_norm = pytest.mark.parametrize("norm", NORMS, ids=str)
TENSOR_SCALE = dict.fromkeys(CODED) | {"NVFP4": 0.0371}
every_coded = pytest.mark.parametrize("fmt", CODED)


def kernel(x, norm, fmt, cast, tensor_scale=None, tile=None, branch=None):
    """Return codes, scales, rms, and the sum with a branch, as CPU tensors."""
    if tile is None and DEVICE == "cpu":  # the interpreter takes its time for each program
        usual = row_tile(x.shape[-1], cast.block_size)
        tile = usual._replace(rows=16 * usual.rows, warps=16 * usual.warps)
    x, branch = x.to(DEVICE), None if branch is None else branch.to(DEVICE)
    found = [t.cpu() for t in launch_cuda(x, branch, tensor_scale, encoding(norm, fmt, cast), tile)]
    return found[: 3 if branch is None else 4]


def assert_codes(x, norm, fmt, cast=None, tile=None):
    """Check the kernel's codes and scales against the numerics with its rms, and return codes, scales and rms."""
    cast = cast or BlockCast(16 if fmt == "NVFP4" else 32)
    codes, scales, rms = kernel(x, norm, fmt, cast, TENSOR_SCALE[fmt], tile)
    expected = block_cast(normalize(x, rms), fmt, -1, cast, TENSOR_SCALE[fmt])
    assert_same_bits(scales, expected.scales.view(torch.uint8))
    assert_same_bits(codes, expected.codes)
    return codes, scales, rms


def assert_rms(x, rms, norm, block_size):
    assert (rms / rms_of(x, norm, block_size)[1] - 1).abs().max() < 1e-6


def reference_rms(x, p, block_size, eps):
    return rms_exact(x, eps) if p is None else rms_estimate(x, p, block_size, eps)


@every_norm
@every_coded
def test_rms_and_codes(norm, fmt):
    x, _, _ = norm_inputs((37, 256), BF16)
    _, _, rms = assert_codes(x, norm, fmt)
    assert_rms(x, rms, norm, 16 if fmt == "NVFP4" else 32)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("columns", [64, 192, 320, 704, 1280, 1536, 1792])
def test_sizes(columns, block_size):
    """Sizes are of the paper's grid and others. 704 columns in blocks of 16 leave the last chunk incomplete."""
    x, _, _ = norm_inputs((5, columns), BF16)
    for fmt in ("E4M3", "E2M1"):
        _, _, rms = assert_codes(x, RowNorm(p=2.0), fmt, BlockCast(block_size))
        assert_rms(x, rms, RowNorm(p=2.0), block_size)


@pytest.mark.parametrize("columns", [64 * k for k in (1, 2, 3, 5, 9, 17, 33, 129, 1024)] + [1280, 8192, 14336])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_tiles_hold_rows_whole(columns, block_size):
    rows, chunk, warps = row_tile(columns, block_size)
    assert chunk % block_size == 0
    assert 0 < columns / chunk <= 8
    assert warps == max(1, rows * chunk / 512)
    assert rows * columns / (warps * 32) <= 128
    assert row_tile(MAX_COLUMNS, 32).warps == 16


@every_rule
@every_rounding
@pytest.mark.parametrize("fmt", ["E4M3", "E5M2", "E2M1"])
def test_rules_and_roundings(fmt, rule, rounding):
    x, _, _ = norm_inputs((16, 128), BF16)
    for pre_round in (False, True):
        assert_codes(x, RowNorm(p=2.0), fmt, BlockCast(32, rule, rounding, operand_pre_round=pre_round))


@every_rounding
def test_nvfp4_roundings(rounding):
    x, _, _ = norm_inputs((16, 128), BF16)
    for pre_round in (False, True):
        assert_codes(x, RowNorm(), "NVFP4", BlockCast(16, rounding=rounding, operand_pre_round=pre_round))


@pytest.mark.parametrize("fmt", ["E4M3", "E2M1"])
def test_gpus_without_instructions_for_pairs(fmt, monkeypatch):
    monkeypatch.setitem(launch_cuda.__globals__, "is_capable_of", lambda *_: False)
    x, _, _ = norm_inputs((37, 256), BF16)
    for rule in ("floor", "rceil"):
        assert_codes(x, RowNorm(p=2.0), fmt, BlockCast(32, rule))


def test_numbers_that_begin_amid_a_word():
    x, _, _ = norm_inputs((1, 4 * 64 + 1), BF16)
    assert_codes(x.flatten()[1:].view(4, 64), RowNorm(p=2.0), "E4M3")


@every_coded
def test_every_bf16_number(fmt):
    """All 2^16 numbers, NaN and infinities included, stand beside their neighbours and, shuffled, beside others."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(BF16)
    shuffled = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    for x in (every, shuffled):
        for norm in (RowNorm(), RowNorm(p=2.0, eps=1e-38)):
            assert_codes(x.view(-1, 128), norm, fmt)


@every_coded
@pytest.mark.parametrize("norm", NORMS[:2], ids=str)
def test_every_significand_over_many_rms(norm, fmt):
    """The test has ties and their neighbours: each of 128 significands, in 8 binades, over 1000 rms."""
    generator = torch.Generator().manual_seed(1)
    significands = 1 + torch.arange(128) / 128
    signs = 1 - 2 * torch.randint(0, 2, (1000, 1024), generator=generator)
    every = (significands[:, None] * 2.0 ** torch.arange(-8, 0)).flatten()
    rows = torch.stack([every[torch.randperm(1024, generator=generator)] for _ in range(8)]).repeat(125, 1)
    x = (rows * signs * 2.0 ** torch.randint(-12, 12, (1000, 1), generator=generator)).to(BF16)
    assert_codes(x[:, :512], norm, fmt)


@pytest.mark.parametrize("exponent", [-130, -110, -70, -60, -41, -39, 0, 39, 41, 60, 70, 110, 125])
@pytest.mark.parametrize("norm", NORMS[:2], ids=str)
def test_rows_and_blocks_of_any_size(norm, exponent):
    """Whole rows, and single blocks in rows of ordinary size, lie around where the kernel begins to divide."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(24, 256, generator=generator)
    blocks = x.clone()
    blocks[::3, 64:96] *= 2.0**exponent
    for sized in (x * 2.0**exponent, blocks, x * 2.0 ** torch.randint(-30, 30, x.shape, generator=generator)):
        for eps in (1e-5, 0.0):
            for fmt in CODED:
                _, _, rms = assert_codes(sized.to(BF16), RowNorm(norm.p, eps=eps), fmt)
                expected = reference_rms(sized.to(BF16), norm.p, 16 if fmt == "NVFP4" else 32, eps)
                assert torch.allclose(rms, expected, rtol=1e-6, atol=0)


@every_coded
@pytest.mark.parametrize("p", [None, 2.0, 0.7])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@every_rounding
def test_rows_that_are_zero_or_not_finite(rounding, bad, p, fmt):
    """The result is that of the numerics, and a row does not affect its neighbours in the tile."""
    cast = BlockCast(16 if fmt == "NVFP4" else 32, rounding=rounding)
    x, _, _ = norm_inputs((16, 128), BF16)
    x[3], x[5], x[4, 100], x[8, 33:35], x[9, ::2] = 0, -0.0, bad, -0.0, -0.0
    codes, scales, rms = assert_codes(x, RowNorm(p), fmt, cast)
    expected = reference_rms(x, p, cast.block_size, 1e-5)
    assert torch.allclose(rms, expected, rtol=1e-6, atol=0, equal_nan=True)
    others = torch.arange(16) != 4
    alone = kernel(x[others], RowNorm(p), fmt, cast, TENSOR_SCALE[fmt])
    for one, other in zip((codes, scales, rms), alone, strict=True):
        assert_same_bits(one[others], other)


@every_coded
@pytest.mark.parametrize("tile", [None, RowTile(4, 64, 4)])
def test_the_sum_with_a_branch(tile, fmt):
    """The sum is rounded and written, and then normalised, also in rows that are divided."""
    x, _, _ = norm_inputs((17, 256), BF16)
    branch, _, _ = norm_inputs((17, 256), BF16, seed=1)
    x[3, 7], x[5] = torch.inf, x[5] * 2.0**-90
    branch[5] = 0
    cast = BlockCast(16 if fmt == "NVFP4" else 32)
    *found, total = kernel(x, RowNorm(p=2.0), fmt, cast, TENSOR_SCALE[fmt], tile, branch)
    assert_same_bits(total, x + branch)
    for one, other in zip(found, kernel(x + branch, RowNorm(p=2.0), fmt, cast, TENSOR_SCALE[fmt], tile), strict=True):
        assert_same_bits(one, other)


def test_rows_of_zeros_without_eps():
    """0 / 0 is NaN."""
    x = torch.zeros(4, 64, dtype=BF16)
    _, scales, rms = assert_codes(x, RowNorm(p=2.0, eps=0.0), "E4M3")
    assert (rms == 0).all()
    assert (scales == 0xFF).all()


@pytest.mark.parametrize("fmt", ["E4M3", "E2M1"])
def test_bits_do_not_depend_on_the_tile(fmt):
    x, _, _ = norm_inputs((19, 512), BF16)
    usual = kernel(x, RowNorm(p=2.0), fmt, BlockCast())
    for tile in (RowTile(1, 128, 4), RowTile(4, 512, 4), RowTile(16, 64, 4)):
        codes, scales, rms = kernel(x, RowNorm(p=2.0), fmt, BlockCast(), tile=tile)
        assert torch.allclose(rms, usual[2], rtol=1e-6, atol=0)
        same = (rms == usual[2]).squeeze(-1)
        assert same.any()
        assert_same_bits(codes[same], usual[0][same])
        assert_same_bits(scales[same], usual[1][same])


@every_coded
def test_codes_are_those_of_a_quantised_tensor(fmt):
    """Decoded, they are x / rms to the format's precision, and leading dimensions stay."""
    x, _, _ = norm_inputs((2, 3, 128), BF16)
    cast, scale = (BlockCast(16), 1 / 64) if fmt == "NVFP4" else (BlockCast(), None)
    found = norm_codes(x.to(DEVICE), RowNorm(p=2.0), fmt, cast, scale)
    decoded = found.quantized(fmt, cast.block_size, scale).dequantize().cpu()
    assert decoded.shape == x.shape
    assert found.rms.shape == (2, 3, 1)
    expected = x.float() / found.rms.cpu()
    assert (decoded - expected).norm() < (0.15 if fmt in ("E2M1", "NVFP4") else 0.1) * expected.norm()
    assert abs(rms_coefficient(2.0, 32) - 0.4185) < 1e-4


@pytest.mark.slow
def test_a_quotient_in_three_operations():
    """The test has every significand of bf16 over every 16th of FP32."""
    x = (1 + np.arange(128, dtype=np.float32) / 128)[:, None]
    for part in range(64):
        bits = (127 << 23) + np.arange(part * 2**17 + 5, (part + 1) * 2**17, 16, dtype=np.int32)
        rms = np.broadcast_to(bits.view(np.float32), (128, len(bits)))
        inverse = np.float32(1) / rms
        q = x * inverse
        q = fused(fused(q, rms, np.broadcast_to(-x, rms.shape)), -inverse, q)
        assert (q == x / rms).all()


def test_a_product_and_a_sum_in_one_rounding():
    """The interpreter's substitute agrees with exact integers, ties of FP32 among them."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(2**23, 2**24, 20000).astype(np.float32) for _ in range(2))
    c = (rng.integers(-(2**24), 2**24, 20000) * 2.0 ** rng.integers(0, 30, 20000)).astype(np.float32)
    exact = [int(x) * int(y) + int(z) for x, y, z in zip(a, b, c, strict=True)]
    got = fused(a, b, c)
    for number, value in zip(exact, got, strict=True):
        neighbours = (np.nextafter(value, np.float32(-np.inf)), np.nextafter(value, np.float32(np.inf)))
        distance = abs(number - int(value))
        assert all(distance <= abs(number - int(other)) for other in neighbours)
        if any(distance == abs(number - int(other)) for other in neighbours):
            assert value.view(np.int32) % 2 == 0
