"""Compare casts bit for bit, and define the parameters that their tests share."""

from __future__ import annotations

import math

import numpy as np
import torch
from each import each
from numpy.typing import NDArray
from reference import ELEMENTS, ROUNDINGS, SCALE_RULES, Array, decode_element, dequantize_array, quantize_array

from mxstudy.numerics import fake_quantize, quantize
from mxstudy.numerics.quantized import Quantized

FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
CODES = {name: np.arange(2 ** (1 + e.exponent_bits + e.mantissa_bits), dtype=np.uint8) for name, e in ELEMENTS.items()}
DECODED = {name: np.array([decode_element(int(code), name) for code in codes]) for name, codes in CODES.items()}

every_format = each("fmt", list(ELEMENTS))
every_rule = each("rule", SCALE_RULES)
every_rounding = each("rounding", ROUNDINGS)


def assert_same_bits(got: torch.Tensor, want: np.ndarray | torch.Tensor) -> None:
    """Check that all are equal, with the sign of zero. Any NaN equals any other."""
    want = torch.as_tensor(np.array(want)) if isinstance(want, np.ndarray) else want
    want = want.to(got.dtype)
    assert got.shape == want.shape
    if got.is_floating_point():
        assert torch.equal(got.isnan(), want.isnan())
        got, want = (t.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf).contiguous() for t in (got, want))
        got, want = got.view(BITS[got.dtype]), want.view(BITS[want.dtype])
    differing = (got != want).nonzero()
    assert not len(differing), f"{len(differing)} of {got.numel()} differ, first at {differing[:5].tolist()}"


def unpacked_pairs(packed: NDArray[np.uint8], axis: int) -> NDArray[np.uint8]:
    """Return one code per byte, of two along `axis` (not negative), the first from the low nibble."""
    nibbles = np.stack([packed % 16, packed // 16], axis + 1)
    return nibbles.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])


def read_codes(quantized: Quantized) -> Array:
    """Return what the codes of a quantised tensor mean, one number per element."""
    codes, name = quantized.codes, quantized.format.name.replace("NVFP4", "E2M1")
    assert codes.dtype == torch.uint8
    return DECODED[name][unpacked_pairs(codes.numpy(), quantized.axis) if quantized.format.bits == 4 else codes.numpy()]


def assert_cast(x: torch.Tensor, fmt: str, **arguments: object) -> None:
    """Check that `quantize` and its decoding equal the array reference.

    Blocks with NaN or Inf are compared in scale and decoding.
    """
    got = quantize(x, fmt, **arguments)
    values, scales = quantize_array(x.double().numpy(), fmt, **arguments)
    axis = arguments.get("axis", -1)
    assert got.values.dtype == torch.float32
    assert got.values.shape == x.shape
    assert got.scales.dtype == torch.uint8
    assert got.tensor_scale is None
    assert_same_bits(got.scales, scales)
    finite = ~np.isnan(values)
    assert_same_bits(got.values[torch.as_tensor(finite)], values[finite])
    assert_same_bits(torch.tensor(read_codes(got)[finite], dtype=torch.float32), values[finite])
    assert_same_bits(got.dequantize(), dequantize_array(values, scales, axis))
    decoded = fake_quantize(x, fmt, **arguments)
    assert decoded.dtype == x.dtype
    assert_same_bits(decoded, dequantize_array(values, scales, axis, str(x.dtype).removeprefix("torch.")))
