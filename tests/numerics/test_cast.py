"""Block casts have the bits of the references in reference.py: encodings, values, scales, decoding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bits import CODES, DECODED, FLOAT8, assert_cast, assert_same_bits, every_format, every_rounding, every_rule
from blocks import KINDS, every_kind, from_bits, with_nan_or_inf
from each import each
from reference import (
    ELEMENTS,
    NAN_SCALE,
    SCALE_RULES,
    decode_scale,
    dequantize_array,
    quantize_array,
    quantize_block,
    to_dtype,
)

from mxstudy.numerics import FORMATS, quantize
from mxstudy.numerics.grid import encode
from mxstudy.numerics.quantized import Quantized

# --------------------------------------------------------------------------------------------- formats and encodings


@pytest.mark.parametrize(("fmt", "dtype"), FLOAT8.items())
def test_the_reference_decodes_as_torch_does(fmt: str, dtype: torch.dtype) -> None:
    assert_same_bits(torch.tensor(CODES[fmt]).view(dtype).float(), DECODED[fmt])


@every_format
@every_rounding
@each("rule", ["floor", "rceil", "even"])  # ceil halves a block whose maximum is no power of two
def test_every_finite_code_survives_the_round_trip(fmt: str, rule: str, rounding: str) -> None:
    finite = CODES[fmt][np.isfinite(DECODED[fmt])]
    top = CODES[fmt][DECODED[fmt] == FORMATS[fmt].max]
    blocks = np.resize(finite, (-(-len(finite) // 15), 15))
    codes = np.concatenate([np.repeat(top[None], len(blocks), 0), blocks], 1)
    assert set(codes.flatten()) == set(finite)
    x = torch.tensor(DECODED[fmt][codes], dtype=torch.float32)
    for shift in (-110, 0, 100):
        got = quantize(x * 2.0**shift, fmt, block_size=16, scale_rule=rule, rounding=rounding)
        assert_same_bits(encode(got.values, got.format), codes)
        assert_same_bits(got.values, x)
        assert (got.scales == 127 + shift).all()
        assert_same_bits(got.dequantize(), x * 2.0**shift)
        assert_same_bits(Quantized.from_codes(got.codes, got.scales, fmt, -1, 16).values, x)


@every_format
def test_every_element_code_under_every_scale_code(fmt: str) -> None:
    elements = np.resize(CODES[fmt], (256, len(CODES[fmt])))
    codes = elements if FORMATS[fmt].bits != 4 else elements[:, ::2] + 16 * elements[:, 1::2]
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    exact = DECODED[fmt] * np.array([[decode_scale(code)] for code in range(256)])
    for axis in (-1, 0):
        turned = [t if axis else t.T for t in (torch.tensor(codes), scales, torch.tensor(exact))]
        got = Quantized.from_codes(*turned[:2], fmt, axis, len(CODES[fmt]))
        for dtype in ("float32", "bfloat16", "float16"):
            assert_same_bits(got.dequantize(getattr(torch, dtype)), to_dtype(turned[2].numpy(), dtype))


# ------------------------------------------------------------------------------------------- values, scales, decoding


@pytest.mark.integration
@every_format
@every_rule
@every_rounding
def test_the_array_reference_equals_the_scalar_one(fmt: str, rule: str, rounding: str) -> None:
    x = every_kind(fmt, 16, per_kind=7)
    values, scales = quantize_array(x.astype(np.float64), fmt, 16, scale_rule=rule, rounding=rounding)
    want = [quantize_block(block, ELEMENTS[fmt], rule, rounding) for block in x.tolist()]
    assert_same_bits(torch.tensor(values, dtype=torch.float32), np.array([v for v, _ in want]))
    assert scales[:, 0].tolist() == [code for _, code in want]


@pytest.mark.integration
@every_format
@every_rule
@every_rounding
def test_scalar_reference(fmt: str, rule: str, rounding: str) -> None:
    x = every_kind(fmt, 32, per_kind=7, seed=1)
    got = quantize(torch.tensor(x), fmt, scale_rule=rule, rounding=rounding)
    for i, block in enumerate(x.tolist()):
        values, code = quantize_block(block, ELEMENTS[fmt], rule, rounding)
        assert got.scales[i].item() == code, f"block {i} of {list(KINDS)} and ties, {7} each: {block}"
        if code == NAN_SCALE:
            assert got.dequantize()[i].isnan().all()
        else:
            assert list(map(float.hex, got.values[i].tolist())) == list(map(float.hex, values)), (i, block)


@pytest.mark.integration
@every_format
@every_rule
@every_rounding
@each("block_size", [16, 32, 64])
def test_array_reference(fmt: str, rule: str, rounding: str, block_size: int) -> None:
    x = torch.tensor(every_kind(fmt, block_size, per_kind=70, seed=2))
    assert_cast(x, fmt, block_size=block_size, scale_rule=rule, rounding=rounding)
    assert_cast(x.T.contiguous(), fmt, block_size=block_size, axis=0, scale_rule=rule, rounding=rounding)


@every_format
def test_scale_code_at_each_end(fmt: str) -> None:
    """By hand, the largest float32 has k = 128 - emax if the rule rounds up, and 127 - emax if it does not."""
    largest = torch.full((1, 32), torch.finfo(torch.float32).max)
    tiniest = torch.full((1, 32), 2.0**-149)
    up = {"floor": 0, "ceil": 1, "rceil": 1, "even": 1}
    for rule, one in up.items():
        assert quantize(largest, fmt, scale_rule=rule).scales.item() == 127 + 127 - FORMATS[fmt].emax + one
        assert quantize(tiniest, fmt, scale_rule=rule).scales.item() == 0
    assert (
        quantize(largest, fmt, scale_rule="floor").dequantize()[0, 0]
        == FORMATS[fmt].max / 2.0 ** FORMATS[fmt].emax * 2.0**127
    )
    assert quantize(largest, fmt, scale_rule="rceil").dequantize()[0, 0] == math.inf


@every_format
def test_non_finite_blocks_keep_to_themselves(fmt: str) -> None:
    rng = np.random.default_rng(3)
    x = torch.tensor(with_nan_or_inf(rng, (16, 32)))
    bad = ~x.isfinite().all(-1)
    assert bad.sum() == 5
    whole, rest = quantize(x.reshape(4, 128), fmt), quantize(x[~bad], fmt)
    decoded = whole.dequantize().reshape(16, 32)
    assert (whole.scales.reshape(16)[bad] == NAN_SCALE).all()
    assert decoded[bad].isnan().all()
    assert_same_bits(decoded[~bad], rest.dequantize())


@pytest.mark.slow
@every_format
@each("dtype", [torch.bfloat16, torch.float16])
@every_rounding
def test_half_precision_input(fmt: str, dtype: torch.dtype, rounding: str) -> None:
    """The input has every finite bit pattern of the dtype, and blocks with the others. Decoding rounds once."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    by_size = patterns[patterns.isfinite()].sort().values
    shuffled = patterns[torch.randperm(len(patterns), generator=torch.Generator().manual_seed(0))]
    for x in (by_size[: len(by_size) // 32 * 32].reshape(-1, 32), shuffled.reshape(-1, 32)):
        for rule in SCALE_RULES:
            assert_cast(x, fmt, scale_rule=rule, rounding=rounding)


@pytest.mark.parametrize("fmt", FLOAT8)
def test_bf16_decoding_rounds_once(fmt: str) -> None:
    """With the smallest scales a product lies between two bf16 numbers, and must be rounded half to even once.

    FP6 and FP4 elements are at least 2^-4, and 2^-4 * 2^-127 is a bf16 number.
    """
    rng = np.random.default_rng(4)
    exponent = rng.integers(0, 8, (512, 32))
    x = torch.tensor(from_bits(exponent << 23 | rng.integers(0, 2**23, (512, 32))))
    values, scales = quantize_array(x.double().numpy(), fmt)
    want = dequantize_array(values, scales, dtype="bfloat16")
    assert (want != dequantize_array(values, scales)).any()
    assert_same_bits(quantize(x, fmt).dequantize(torch.bfloat16), want)
