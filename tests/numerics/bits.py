"""Bit-for-bit comparisons of casts, and the parameters that their tests share."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference import ROUNDINGS, SCALE_RULES, dequantize_array, quantize_array

from mxstudy.numerics import fake_quantize, quantize

FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
every_format = pytest.mark.parametrize("fmt", list(FLOAT8))
every_rule = pytest.mark.parametrize("rule", SCALE_RULES)
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)


def assert_same_bits(got: torch.Tensor, want: np.ndarray | torch.Tensor) -> None:
    """Equal, the sign of zero included; any NaN equals any other."""
    want = torch.as_tensor(np.array(want)) if isinstance(want, np.ndarray) else want
    want = want.to(got.dtype)
    assert got.shape == want.shape
    if got.is_floating_point():
        assert torch.equal(got.isnan(), want.isnan())
        got, want = (t.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf).contiguous() for t in (got, want))
        got, want = got.view(BITS[got.dtype]), want.view(BITS[want.dtype])
    differing = (got != want).nonzero()
    assert not len(differing), f"{len(differing)} of {got.numel()} differ, first at {differing[:5].tolist()}"


def assert_cast(x: torch.Tensor, fmt: str, **arguments: object) -> None:
    """`quantize` and its decoding equal the array reference; blocks with NaN or Inf in scale and decoding."""
    got = quantize(x, fmt, **arguments)
    values, scales = quantize_array(x.double().numpy(), fmt, **arguments)
    axis = arguments.get("axis", -1)
    assert got.values.dtype == torch.float32
    assert got.values.shape == x.shape
    assert got.scales.dtype == torch.uint8
    assert got.codes.dtype == torch.uint8
    assert_same_bits(got.scales, scales)
    finite = torch.as_tensor(~np.isnan(values))
    assert_same_bits(got.values[finite], values[finite.numpy()])
    assert_same_bits(got.codes.view(FLOAT8[fmt]).float()[finite], got.values[finite])
    assert_same_bits(got.dequantize(), dequantize_array(values, scales, axis))
    decoded = fake_quantize(x, fmt, **arguments)
    assert decoded.dtype == x.dtype
    assert_same_bits(decoded, dequantize_array(values, scales, axis, str(x.dtype).removeprefix("torch.")))
