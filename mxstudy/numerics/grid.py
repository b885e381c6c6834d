"""The grid of an element format: rounding to it, and the bit patterns of its values.

Results are exact, with the same bits on every device, eager or compiled: exponents are read and written as bits, and
all scaling is by powers of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxstudy.numerics.formats import ROUNDINGS, ElementFormat, look_up
from mxstudy.reader import ConfigError, require

EXPONENT_MASK = 0x7F800000  # of FP32; also the bits of infinity
MAGNITUDE_MASK = 0x7FFFFFFF
MANTISSA_MASK = 0x007FFFFF
MANTISSA_BITS = 23


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x.to(dtype), or x itself, with no operation, if it has that dtype.

    In torch 2.11 a compiled autograd.Function has zero gradients if a result went through a .to() that changes nothing.
    """
    return x if x.dtype == dtype else x.to(dtype)


def round_to_grid(x: Tensor, fmt: ElementFormat, rounding: str, u: Tensor | None = None) -> Tensor:
    """Round x (float32) to a value of the format, saturating; NaN stays NaN.

    `u`: float32 random numbers of x's shape, uniform in [0, 1), for a rounding that draws.
    """
    x = x.clamp(-fmt.max, fmt.max)
    binade = (x.view(torch.int32) & EXPONENT_MASK).view(torch.float32)  # 2^floor(log2 |x|), 0 for an FP32 subnormal
    step_bits = (binade.clamp_min(2.0**fmt.emin) * 2.0**-fmt.mantissa_bits).view(torch.int32)
    inverse_step = ((254 << MANTISSA_BITS) - step_bits).view(torch.float32)
    apply, draws = look_up(ROUNDINGS, rounding, "rounding")
    require(not draws or u is not None, f"rounding: {rounding} needs random numbers; give `u`")
    steps = apply(x * inverse_step, u) if draws else apply(x * inverse_step)
    return steps * step_bits.view(torch.float32)


def round_to_bf16_away(x: Tensor) -> Tensor:
    """Return fp32 rounded to the nearest bf16 value, ties away from zero, as microxcaling rounds operands."""
    bits = x.view(torch.int32)
    return torch.where(x.isfinite(), ((bits + 0x8000) & -0x10000).view(torch.float32), x)


def round_to_bf16(x: Tensor) -> Tensor:
    """Return fp32 rounded to the nearest bf16 value, ties to even.

    It works on bits because compilers drop a conversion to bf16 and back.
    """
    bits = x.view(torch.int32)
    return torch.where(x.isfinite(), ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32), x)


def encode(values: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the uint8 codes, one per byte, of fp32 values on the grid.

    NaN becomes a magnitude of all ones, though formats of 6 and 4 bits have no NaN.
    """
    bits = values.view(torch.int32)
    shift = MANTISSA_BITS - fmt.mantissa_bits
    normal = ((bits & MAGNITUDE_MASK) >> shift) - ((126 + fmt.emin) << fmt.mantissa_bits)
    magnitude = values.abs()
    subnormal = (magnitude * (1 / fmt.min_subnormal)).to(torch.int32)
    code = torch.where(magnitude < 2.0**fmt.emin, subnormal, normal)
    sign = torch.where(bits < 0, 1 << (fmt.bits - 1), 0)
    return torch.where(values.isnan(), (1 << (fmt.bits - 1)) - 1, code | sign).to(torch.uint8)


def decode(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the fp32 values of uint8 codes, one per byte.

    Codes above that of `max` are NaN, except E5M2's first, which is infinity.
    """
    sign_bit, leading_one = 1 << (fmt.bits - 1), 1 << fmt.mantissa_bits
    magnitude = codes.to(torch.int32) & (sign_bit - 1)
    exponent, mantissa = magnitude >> fmt.mantissa_bits, magnitude & (leading_one - 1)
    significand = torch.where(exponent > 0, mantissa | leading_one, mantissa).to(torch.float32)
    step = ((exponent.clamp_min(1) + (126 + fmt.emin - fmt.mantissa_bits)) << MANTISSA_BITS).view(torch.float32)
    value = significand * step
    value = torch.where(value > fmt.max, torch.inf if fmt.has_infinity else torch.nan, value)
    value = torch.where((value == torch.inf) & (mantissa > 0), torch.nan, value)
    return torch.where(codes.to(torch.int32) >= sign_bit, -value, value)


def pack_pairs(codes: Tensor, axis: int) -> Tensor:
    """Pack two 4-bit codes per byte along `axis`, the first in the low nibble. Raises ConfigError for an odd axis."""
    if codes.shape[axis] % 2:
        raise ConfigError(f"axis {axis} of shape {list(codes.shape)} is odd: 4-bit codes need pairs; give an even size")
    low, high = codes.unflatten(axis, (-1, 2)).unbind(axis % codes.ndim + 1)
    return low | (high << 4)


def unpack_pairs(packed: Tensor, axis: int) -> Tensor:
    """Undo `pack_pairs`."""
    axis %= packed.ndim
    return torch.stack((packed & 0xF, packed >> 4), axis + 1).flatten(axis, axis + 1)
