"""Define what the numerics must compute, twice and without torch.

The scalar half works in exact fractions and follows the OCP Microscaling Formats specification 1.0 (sections 5 and 6)
line by line, with the scale rules of torchao's ScaleCalculationMode. The array half is float64 numpy, fast enough for
GEMM references; test_cast.py holds it to the scalar half. float64 is exact here: a float32 times any E8M0 scale fits.
Scales that are no powers of two are in reference_float_scales.py, norms in reference_mxnorm.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NAN_SCALE = 0xFF
SCALE_BIAS = 127


@dataclass(frozen=True)
class Element:
    """A sign, `exponent_bits` and `mantissa_bits`, with subnormals. The largest finite value is `max`."""

    exponent_bits: int
    mantissa_bits: int
    max: float

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def emin(self) -> int:
        return 1 - self.bias

    @property
    def emax(self) -> int:
        return floor_log2(Fraction(self.max))


ELEMENTS = {
    "E4M3": Element(4, 3, 448.0),
    "E5M2": Element(5, 2, 57344.0),
    "E3M2": Element(3, 2, 28.0),
    "E2M3": Element(2, 3, 7.5),
    "E2M1": Element(2, 1, 6.0),
    "E1M2": Element(1, 2, 3.5),
}
SCALE_RULES = ("floor", "ceil", "rceil", "even")
ROUNDINGS = ("even", "away")
BFLOAT16 = Element(8, 7, float.fromhex("0x1.fep127"))
FLOAT16 = Element(5, 10, 65504.0)


# ---------------------------------------------------------------------------------------- scalars, in exact fractions


def floor_log2(value: Fraction) -> int:
    """Return the largest k with 2^k <= value, for value > 0."""
    k = value.numerator.bit_length() - value.denominator.bit_length()
    return k if Fraction(2) ** k <= value else k - 1


def ceil_log2(value: Fraction) -> int:
    """Return the smallest k with value <= 2^k, for value > 0."""
    k = floor_log2(value)
    return k if Fraction(2) ** k == value else k + 1


def half_up(value: Fraction, mantissa_bits: int) -> Fraction:
    """Return value > 0 rounded to `mantissa_bits` behind the leading one, halves up."""
    step = Fraction(2) ** (floor_log2(value) - mantissa_bits)
    return math.floor(value / step + Fraction(1, 2)) * step


def scale_exponent(absmax: float, element: Element, rule: str) -> int:
    """Return k of the E8M0 scale 2^k of a finite block."""
    if absmax == 0:
        return -SCALE_BIAS
    a = Fraction(absmax)
    k = {
        "floor": lambda: floor_log2(a) - element.emax,
        "ceil": lambda: ceil_log2(a) - element.emax,
        "rceil": lambda: ceil_log2(a / Fraction(element.max)),
        "even": lambda: floor_log2(half_up(a, element.mantissa_bits)) - element.emax,
    }[rule]()
    return min(max(k, -SCALE_BIAS), SCALE_BIAS)


def round_element(value: Fraction, element: Element, rounding: str) -> float:
    """Return value >= 0 rounded to the element grid. Above the largest finite value it saturates."""
    value = min(value, Fraction(element.max))
    exponent = max(floor_log2(value), element.emin) if value else element.emin
    step = Fraction(2) ** (exponent - element.mantissa_bits)
    steps = math.floor(value / step)
    rest = value / step - steps
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and (rounding == "away" or steps % 2 == 1)):
        steps += 1
    return float(steps * step)


def quantize_block(block: Sequence[float], element: Element, rule: str, rounding: str) -> tuple[list[float], int]:
    """Return a block's elements before the scale, and the scale's code."""
    if not all(map(math.isfinite, block)):
        return [math.nan] * len(block), NAN_SCALE
    k = scale_exponent(max(map(abs, block)), element, rule)
    scale = Fraction(2) ** k
    values = [math.copysign(round_element(abs(Fraction(x)) / scale, element, rounding), x) for x in block]
    return values, k + SCALE_BIAS


def decode_element(code: int, name: str) -> float:
    """Return the value of a bit pattern. E4M3: NaN at S.1111.111, no infinity; E5M2: IEEE; others: all finite."""
    element = ELEMENTS[name]
    m, e = element.mantissa_bits, element.exponent_bits
    mantissa, exponent, sign = code & (2**m - 1), code >> m & (2**e - 1), code >> (m + e)
    last = exponent == 2**e - 1
    if name == "E4M3" and last and mantissa == 7:
        return math.nan
    if name == "E5M2" and last:
        return math.nan if mantissa else (-1) ** sign * math.inf
    fraction = mantissa / 2**m + (exponent > 0)
    return (-1.0) ** sign * math.ldexp(fraction, max(exponent, 1) - element.bias)


def decode_scale(code: int) -> float:
    """Return 2^k, which a Python float holds exactly for all codes but NaN's."""
    return math.nan if code == NAN_SCALE else math.ldexp(1.0, code - SCALE_BIAS)


# ------------------------------------------------------------------------------------------- arrays, in float64 numpy


def round_to(x: Array, element: Element, rounding: str = "even") -> Array:
    """Return x on the grid of `element`, its exponent range unbounded above. It is exact for |x| < 2^53 steps."""
    exponent = np.maximum(np.frexp(x)[1] - 1, element.emin)
    step = np.ldexp(1.0, exponent - element.mantissa_bits)
    steps = np.abs(x) / step
    return np.copysign((np.rint(steps) if rounding == "even" else np.floor(steps + 0.5)) * step, x)


def to_dtype(x: Array, dtype: str, rounding: str = "even") -> Array:
    """Return float64 rounded once to bfloat16, float16 or float32, infinite beyond the largest number.

    float32 is always rounded half to even.
    """
    if dtype == "float32":
        with np.errstate(over="ignore"):
            return x.astype(np.float32).astype(np.float64)
    element = {"bfloat16": BFLOAT16, "float16": FLOAT16}[dtype]
    with np.errstate(invalid="ignore"):
        rounded = np.where(np.isfinite(x), round_to(np.where(np.isfinite(x), x, 0.0), element, rounding), x)
    return np.where(np.abs(rounded) > element.max, np.copysign(np.inf, x), rounded)


def scale_exponents(absmax: Array, element: Element, rule: str) -> NDArray[np.int64]:
    """Return `scale_exponent` of every entry. With a = f * 2^e and f in [1/2, 1), floor(log2 a) = e - 1."""
    fraction, e = np.frexp(absmax)
    if rule == "even":
        fraction, shift = np.frexp(np.floor(np.ldexp(fraction, element.mantissa_bits + 1) + 0.5))
        e = e + shift - element.mantissa_bits - 1
    threshold = {"floor": 1.0, "even": 1.0, "ceil": 0.5, "rceil": element.max / 2.0 ** (element.emax + 1)}[rule]
    k = e - 1 - element.emax + (fraction > threshold)
    return np.clip(np.where(absmax == 0, -SCALE_BIAS, k), -SCALE_BIAS, SCALE_BIAS)


def quantize_array(
    x: Array,
    name: str,
    block_size: int = 32,
    axis: int = -1,
    scale_rule: str = "rceil",
    rounding: str = "even",
    operand_pre_round: bool = False,
) -> tuple[Array, NDArray[np.uint8]]:
    """Return elements before the scale, in x's shape, and scale codes.

    The codes have x's shape with `axis` divided by the block size. `operand_pre_round` first rounds x to bfloat16, ties
    away from zero.
    """
    element = ELEMENTS[name]
    x = np.asarray(x, np.float64)
    blocks = np.moveaxis(to_dtype(x, "bfloat16", "away") if operand_pre_round else x, axis, -1)
    shape = blocks.shape
    blocks = blocks.reshape(*shape[:-1], -1, block_size)
    bad = ~np.isfinite(blocks).all(-1, keepdims=True)
    blocks = np.where(bad, 0.0, blocks)
    k = scale_exponents(np.abs(blocks).max(-1, keepdims=True), element, scale_rule)
    values = round_to(np.clip(np.ldexp(blocks, -k), -element.max, element.max), element, rounding)
    codes = np.where(bad, NAN_SCALE, k + SCALE_BIAS).astype(np.uint8)
    values = np.where(bad, np.nan, values).reshape(shape)
    return np.moveaxis(values, -1, axis), np.moveaxis(codes[..., 0], -1, axis)


def dequantize_array(values: Array, codes: NDArray[np.uint8], axis: int = -1, dtype: str = "float32") -> Array:
    """Return elements times their block's scale, rounded once to `dtype`."""
    block_size = values.shape[axis] // codes.shape[axis]
    k = np.repeat(codes.astype(np.int64) - SCALE_BIAS, block_size, axis)
    exact = np.where(k == NAN_SCALE - SCALE_BIAS, np.nan, np.ldexp(values, k))
    return to_dtype(exact, dtype)


def fake_quantize_array(
    x: Array,
    name: str | None,
    axis: int = -1,
    dtype: str = "float32",
    block_size: int = 32,
    pad_blocks: bool = False,
    **cast: object,
) -> Array:
    """Return what a GEMM multiplies: x quantised and decoded, or (no format) rounded to the compute dtype.

    `pad_blocks` fills up incomplete blocks with zeros, and cuts them off again.
    """
    if name is None:
        return to_dtype(x, dtype)
    size = x.shape[axis]
    if pad_blocks:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -size % block_size)
        x = np.pad(x, widths)
    values, codes = quantize_array(x, name, block_size, axis, **cast)  # type: ignore[arg-type]
    return dequantize_array(values, codes, axis, dtype).take(range(size), axis)
