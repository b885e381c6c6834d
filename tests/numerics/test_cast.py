"""The block casts, bit by bit, against the references in reference.py: encodings, values, scales, decoding."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from bits import FLOAT8, assert_cast, assert_same_bits, every_format, every_rounding, every_rule
from blocks import KINDS, every_kind, from_bits, with_nan_or_inf
from reference import (
    ELEMENTS,
    NAN_SCALE,
    SCALE_RULES,
    decode_element,
    decode_scale,
    dequantize_array,
    quantize_array,
    quantize_block,
    to_dtype,
)

from mxstudy.numerics import FORMATS, quantize

# --------------------------------------------------------------------------------------------- formats and encodings


@every_format
def test_format_constants(fmt: str) -> None:
    got, want = FORMATS[fmt], ELEMENTS[fmt]
    assert (got.max, got.emax, got.mantissa_bits) == (want.max, want.emax, want.mantissa_bits)


@every_format
def test_every_code_decodes_as_torch_decodes_it(fmt: str) -> None:
    want = np.array([decode_element(code, fmt) for code in range(256)])
    assert_same_bits(torch.arange(256, dtype=torch.uint8).view(FLOAT8[fmt]).float(), want)


@every_format
@every_rounding
@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])  # ceil halves a block whose maximum is no power of two
def test_every_finite_code_survives_the_round_trip(fmt: str, rule: str, rounding: str) -> None:
    codes = [code for code in range(256) if math.isfinite(decode_element(code, fmt))]
    top = next(code for code in codes if decode_element(code, fmt) == FORMATS[fmt].max)
    codes += [top] * (-len(codes) % 15)
    blocks = [[top, *codes[i : i + 15]] for i in range(0, len(codes), 15)]
    want = torch.tensor(blocks, dtype=torch.uint8)
    x = torch.tensor([[decode_element(code, fmt) for code in block] for block in blocks])
    for shift in (-110, 0, 100):
        got = quantize(x * 2.0**shift, fmt, block_size=16, scale_rule=rule, rounding=rounding)
        assert_same_bits(got.codes, want)
        assert_same_bits(got.values, x)
        assert (got.scales == 127 + shift).all()
        assert_same_bits(got.dequantize(), x * 2.0**shift)


@every_format
def test_every_scale_code_decodes(fmt: str) -> None:
    quantized = quantize(torch.ones(256, 32), fmt)
    every = dataclasses.replace(
        quantized,
        values=torch.tensor([1.0, -1.75, 0.5, 0.0]).repeat(256, 8),
        scales=torch.arange(256, dtype=torch.uint8)[:, None],
    )
    exact = np.array([[decode_scale(code) * v for v in (1.0, -1.75, 0.5, 0.0)] * 8 for code in range(256)])
    assert_same_bits(every.dequantize(), to_dtype(exact, "float32"))
    assert_same_bits(every.dequantize(torch.bfloat16), to_dtype(exact, "bfloat16"))
    assert_same_bits(every.dequantize(torch.float16), to_dtype(exact, "float16"))


# ------------------------------------------------------------------------------------------- values, scales, decoding


@pytest.mark.parametrize("name", list(ELEMENTS))
@every_rule
@every_rounding
def test_the_array_reference_equals_the_scalar_one(name: str, rule: str, rounding: str) -> None:
    x = every_kind(name, 16, per_kind=7)
    values, scales = quantize_array(x.astype(np.float64), name, 16, scale_rule=rule, rounding=rounding)
    want = [quantize_block(block, ELEMENTS[name], rule, rounding) for block in x.tolist()]
    assert_same_bits(torch.tensor(values, dtype=torch.float32), np.array([v for v, _ in want]))
    assert scales[:, 0].tolist() == [code for _, code in want]


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


@every_format
@every_rule
@every_rounding
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_array_reference(fmt: str, rule: str, rounding: str, block_size: int) -> None:
    x = torch.tensor(every_kind(fmt, block_size, per_kind=70, seed=2))
    assert_cast(x, fmt, block_size=block_size, scale_rule=rule, rounding=rounding)
    assert_cast(x.T.contiguous(), fmt, block_size=block_size, axis=0, scale_rule=rule, rounding=rounding)


@every_format
def test_scale_code_at_each_end(fmt: str) -> None:
    """2^k by hand: the largest float32 has k = 128 - emax where the rule rounds up, 127 - emax where it does not."""
    largest = torch.full((1, 32), torch.finfo(torch.float32).max)
    tiniest = torch.full((1, 32), 2.0**-149)
    up = {"floor": 0, "ceil": 1, "rceil": 1, "even": 1}
    for rule, one in up.items():
        assert quantize(largest, fmt, scale_rule=rule).scales.item() == 127 + 127 - FORMATS[fmt].emax + one
        assert quantize(tiniest, fmt, scale_rule=rule).scales.item() == 0
    assert quantize(largest, fmt, scale_rule="floor").dequantize()[0, 0] == 1.75 * 2.0**127
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


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_rounding
def test_half_precision_input(fmt: str, dtype: torch.dtype, rounding: str) -> None:
    """Every finite bit pattern of the dtype, and blocks with the others; decoding rounds once to the dtype."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    by_size = patterns[patterns.isfinite()].sort().values
    shuffled = patterns[torch.randperm(len(patterns), generator=torch.Generator().manual_seed(0))]
    for x in (by_size[: len(by_size) // 32 * 32].reshape(-1, 32), shuffled.reshape(-1, 32)):
        for rule in SCALE_RULES:
            assert_cast(x, fmt, scale_rule=rule, rounding=rounding)


@every_format
def test_bf16_decoding_rounds_once(fmt: str) -> None:
    """The smallest scales, where a product is below bf16's grid and must be rounded half to even from the exact one."""
    rng = np.random.default_rng(4)
    exponent = rng.integers(0, 8, (512, 32))
    x = torch.tensor(from_bits(exponent << 23 | rng.integers(0, 2**23, (512, 32))))
    values, scales = quantize_array(x.double().numpy(), fmt)
    want = dequantize_array(values, scales, dtype="bfloat16")
    assert (want != dequantize_array(values, scales)).any()
    assert_same_bits(quantize(x, fmt).dequantize(torch.bfloat16), want)
