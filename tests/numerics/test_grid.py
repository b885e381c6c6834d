"""Numbers round to an element format's grid and to bf16, and become codes, pairs of codes, and one scale per tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bits import CODES, DECODED, assert_same_bits, every_format, every_rounding, every_rule, unpacked_pairs
from blocks import any_exponent, every_kind, from_bits, one_binade_per_block
from each import each
from gemms import tensor_cast
from reference import ELEMENTS, dequantize_array, quantize_array, round_to, to_dtype
from reference_float_scales import tensor_cast_array

from mxstudy.numerics import FORMATS, quantize
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.grid import (
    decode,
    encode,
    pack_pairs,
    round_to_bf16,
    round_to_bf16_away,
    round_to_grid,
    unpack_pairs,
)
from mxstudy.numerics.quantized import CODE_DTYPES, Quantized
from mxstudy.reader import ConfigError

# -------------------------------------------------------------------------------------------------------------- codes


@every_format
def test_every_code(fmt: str) -> None:
    codes, values = torch.tensor(CODES[fmt]), torch.tensor(DECODED[fmt], dtype=torch.float32)
    assert_same_bits(decode(codes, FORMATS[fmt]), values)
    finite = values.isfinite()
    assert_same_bits(encode(values[finite], FORMATS[fmt]), codes[finite])


@every_format
def test_the_code_of_nan_is_all_ones(fmt: str) -> None:
    """E4M3 and E5M2 decode it as NaN. 6 and 4 bits have no NaN, and the scale of their block says it."""
    nan = torch.tensor([torch.nan, -torch.nan])
    assert encode(nan, FORMATS[fmt]).tolist() == [2 ** (FORMATS[fmt].bits - 1) - 1] * 2
    if FORMATS[fmt].bits == 8:
        assert decode(encode(nan, FORMATS[fmt]), FORMATS[fmt]).isnan().all()


# ----------------------------------------------------------------------------------------------------------- rounding


@every_format
@every_rounding
def test_round_to_grid(fmt: str, rounding: str) -> None:
    element, rng = ELEMENTS[fmt], np.random.default_rng(30)
    edges = np.array([0.0, -0.0, 2.0**-149, 3e38, np.inf, -np.inf, element.max, -element.max])
    small = np.ldexp(rng.uniform(-2, 2, 2**14), rng.integers(element.emin - 8, element.emax + 2, 2**14))
    x = np.concatenate([any_exponent(rng, (128, 128)).flatten(), small, edges]).astype(np.float32)
    want = round_to(np.clip(x.astype(np.float64), -element.max, element.max), element, rounding)
    got = round_to_grid(torch.tensor(x), FORMATS[fmt], rounding)
    assert_same_bits(got, want)
    assert np.isin(got.numpy(), DECODED[fmt]).all()
    assert round_to_grid(torch.tensor([torch.nan]), FORMATS[fmt], rounding).isnan().all()


@every_format
@every_rounding
def test_ties(fmt: str, rounding: str) -> None:
    """Between neighbours a tie goes to the even code, or to the larger one. A unit beside it is no tie."""
    grid = torch.tensor(DECODED[fmt][: np.argmax(DECODED[fmt] == FORMATS[fmt].max) + 1], dtype=torch.float32)
    low, high, middle = grid[:-1], grid[1:], (grid[:-1] + grid[1:]) / 2
    to_even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    for sign in (1, -1):
        for x, want in (
            (middle, to_even if rounding == "even" else high),
            (middle.nextafter(low), low),
            (middle.nextafter(high), high),
        ):
            assert_same_bits(round_to_grid(sign * x, FORMATS[fmt], rounding), sign * want)


# -------------------------------------------------------------------------------------------------------------- pairs


def test_the_first_of_a_pair_is_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.uint8)
    assert pack_pairs(codes, 1).tolist() == [[0x21, 0x43], [0x65, 0x87]]
    assert pack_pairs(codes, 0).tolist() == [[0x51, 0x62, 0x73, 0x84]]


@each("axis", [0, 1, 2, -1, -2, -3])
def test_pairs_along_any_axis(axis: int) -> None:
    codes = torch.randint(0, 16, (4, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(31))
    packed = pack_pairs(codes, axis)
    assert packed.dtype == torch.uint8
    assert packed.numel() == codes.numel() // 2
    assert packed.shape[axis] == codes.shape[axis] // 2
    assert_same_bits(torch.tensor(unpacked_pairs(packed.numpy(), axis % 3)), codes)
    assert_same_bits(unpack_pairs(packed, axis), codes)


def test_an_odd_axis_cannot_be_paired() -> None:
    with pytest.raises(ConfigError, match=r"axis 0 of shape \[3, 32\] is odd"):
        pack_pairs(torch.zeros(3, 32, dtype=torch.uint8), 0)
    with pytest.raises(ConfigError, match="odd"):
        quantize(torch.ones(32, 15), "E2M1", block_size=15).codes  # noqa: B018


@pytest.mark.integration
@every_format
@each("axis", [0, 1, -1, -2, -3])
def test_from_codes_is_the_inverse_of_codes_and_scales(fmt: str, axis: int) -> None:
    x = torch.tensor(one_binade_per_block(np.random.default_rng(32), (32 * 64, 96)).reshape(32, 64, 96))
    got = quantize(x, fmt, axis=axis)
    per_byte = 2 if FORMATS[fmt].bits == 4 else 1
    assert got.codes.shape[axis] * per_byte == x.shape[axis]
    again = Quantized.from_codes(got.codes, got.scales, fmt, axis, 32)
    assert (again.format, again.axis, again.block_size) == (got.format, got.axis, got.block_size)
    assert_same_bits(again.values, got.values)
    assert_same_bits(again.dequantize(), got.dequantize())


@every_format
def test_codes_and_scales_in_torchs_own_dtypes(fmt: str) -> None:
    got = quantize(torch.randn(64, 64, generator=torch.Generator().manual_seed(33)), fmt)
    codes = got.codes.view(CODE_DTYPES.get(fmt, torch.uint8))
    again = Quantized.from_codes(codes, got.scales.view(torch.float8_e8m0fnu), fmt, -1, 32)
    assert_same_bits(again.dequantize(), got.dequantize())
    for bad in ({"codes": got.codes.int()}, {"scales": got.scales.float()}, {"scales": got.scales.view(torch.int8)}):
        given = {"codes": got.codes, "scales": got.scales} | bad
        with pytest.raises(ConfigError, match=f"{next(iter(bad))}: torch"):
            Quantized.from_codes(**given, fmt=fmt, axis=-1, block_size=32)
    with pytest.raises(ConfigError, match=f"tensor_scale: {fmt} has none"):
        Quantized.from_codes(got.codes, got.scales, fmt, -1, 32, torch.ones(()))


# --------------------------------------------------------------------------------------------------- operands to bf16


def bf16_edges() -> np.ndarray:
    """Return every upper half of a float32 with six lower halves: below, at and above the tie."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return from_bits((np.arange(2**16)[:, None] << 16 | lower).astype(np.uint32))


def test_bf16_half_away() -> None:
    """Subnormals of bf16 are kept, numbers that round beyond its largest become infinite, and NaN stays."""
    x = bf16_edges()
    got = round_to_bf16_away(torch.tensor(x))
    with np.errstate(invalid="ignore"):
        assert_same_bits(got, to_dtype(x.astype(np.float64), "bfloat16", "away"))
    assert_same_bits(got.bfloat16().float(), got)
    assert round_to_bf16_away(torch.tensor([torch.finfo(torch.float32).max])).isinf().all()
    ties = torch.tensor(x[:, 3])
    assert (round_to_bf16_away(ties) != ties.bfloat16().float()).sum() > 2**14


@pytest.mark.integration
@every_format
@every_rule
@every_rounding
def test_operand_pre_round(fmt: str, rule: str, rounding: str) -> None:
    """The cast sees bf16 numbers, and differs from the cast of x at ties of the element."""
    x = torch.tensor(every_kind(fmt, 32, per_kind=16, seed=33))
    lower = np.arange(2**15).reshape(-1, 32) * 2**8
    halves = torch.tensor(from_bits(0x3F800000 + np.concatenate([lower, lower - 1])))
    for blocks in (x, halves):
        for axis in (0, 1):
            blocks = blocks[: len(blocks) // 32 * 32]
            got = block_cast(blocks, fmt, axis, BlockCast(32, rule, rounding, operand_pre_round=True))
            cast = {"axis": axis, "scale_rule": rule, "rounding": rounding}
            want = quantize_array(blocks.numpy(), fmt, operand_pre_round=True, **cast)
            assert_same_bits(got.scales, want[1])
            assert_same_bits(got.dequantize(), dequantize_array(*want, axis=axis))
    assert (got.values != quantize(halves, fmt, axis=1, scale_rule=rule, rounding=rounding).values).any()


def test_operand_pre_round_changes_no_bf16_number() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(34)).bfloat16()
    for fmt in FORMATS:
        size = FORMATS[fmt].block_size
        plain, rounded = (block_cast(x, fmt, 1, BlockCast(size, operand_pre_round=on)) for on in (False, True))
        assert_same_bits(rounded.dequantize(), plain.dequantize())


# -------------------------------------------------------------------------------------------------- one scale a tensor


@every_format
@every_rounding
@each("pre_round", [False, True])
def test_one_scale_a_tensor(fmt: str, rounding: str, pre_round: bool) -> None:
    rng = np.random.default_rng(35)
    cast = BlockCast(rounding=rounding, operand_pre_round=pre_round)
    for binade in (-149, -130, -126, -60, 0, 60, 126):
        x = np.ldexp(np.exp(2 * rng.standard_normal((48, 33))) * rng.choice([-1, 1], (48, 33)), binade)
        x = np.clip(x, -3e38, 3e38).astype(np.float32)
        exact = to_dtype(x.astype(np.float64), "bfloat16", "away") if pre_round else x
        values, scale = tensor_cast_array(exact, fmt, rounding)
        got, got_scale = tensor_cast(torch.tensor(x), fmt, cast)
        assert (got.dtype, got_scale.dtype, got_scale.shape) == (torch.float32, torch.float32, ())
        assert_same_bits(got_scale, scale)
        assert_same_bits(got, values)
        assert abs(values).max() == FORMATS[fmt].max or binade < -110


@every_format
@every_rounding
def test_one_scale_a_tensor_divides(fmt: str, rounding: str) -> None:
    """Around ties of x / scale, a product with 1 / scale, which rounds twice, would go to the other side."""
    grid = np.unique(np.abs(DECODED[fmt][np.isfinite(DECODED[fmt])]))
    ties = (grid[1:] + grid[:-1]) / 2
    for absmax in np.linspace(1, 2, 64, dtype=np.float32):
        scale = absmax / np.float32(FORMATS[fmt].max)
        bits = (ties * scale).astype(np.float32).view(np.int32)[:, None] + np.arange(-3, 4)
        x = np.append(from_bits(bits), absmax)
        got, got_scale = tensor_cast(torch.tensor(x), fmt, BlockCast(rounding=rounding))
        assert got_scale == scale
        assert_same_bits(got, tensor_cast_array(x, fmt, rounding)[0])


@every_format
def test_one_scale_a_tensor_at_the_ends(fmt: str) -> None:
    zeros = torch.tensor([0.0, -0.0]).repeat(3, 2)
    values, scale = tensor_cast(zeros, fmt)
    assert_same_bits(values, zeros)
    assert scale == 2.0**-126
    for bad in (torch.nan, torch.inf, -torch.inf):
        values, scale = tensor_cast(torch.tensor([[1.0, bad]]), fmt)
        assert values.isnan().all()
        assert scale.isnan()


def test_round_to_bf16() -> None:
    """`round_to_bf16` rounds as torch converts.

    The numbers are all of bf16, the midpoints between them, their FP32 neighbours, and the largest.
    """
    halves = torch.arange(0, 2**32, 2**15, dtype=torch.int64)
    bits = torch.cat([halves + shift for shift in (-1, 0, 1)]) % 2**32
    x = (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)
    expected = x.to(torch.bfloat16).to(torch.float32)
    got = round_to_bf16(x)
    same = (got.view(torch.int32) == expected.view(torch.int32)) | (got.isnan() & expected.isnan())
    assert len(x) == 3 * 2**17
    assert same.all()
