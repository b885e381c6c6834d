"""The MX cast: blocks of an axis to small floats that share one power-of-two scale.

    absmax a of a block -> scale 2^k (a rule of SCALE_RULES) -> x / 2^k, clamped to max -> nearest element value

Exact and the same bits on every device, eager or compiled: exponents are read and written as bits, all scaling is by
powers of two, overflow is clamped here because float8 casts of torch before 2.13 do not saturate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mxstudy.numerics.formats import FORMATS, ROUNDINGS, SCALE_RULES, ElementFormat, look_up
from mxstudy.reader import ConfigError

EXPONENT_MASK = 0x7F800000  # of FP32; also the bits of infinity
MAGNITUDE_MASK = 0x7FFFFFFF
NAN_BITS = 0x7FC00000
HALF_MIN_NORMAL_BITS = 0x00400000  # 2^-127, an FP32 subnormal: E8M0 code 0
NAN_SCALE = 0xFF
QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class BlockCast:
    """How tensors are cut into blocks and rounded; the element format is each operand's own."""

    block_size: int = 32
    scale_rule: str = "rceil"
    rounding: str = "even"


@dataclass(frozen=True)
class Quantized:
    """`values` float32 on the element grid, x's shape; `scales` uint8 E8M0 codes, `axis` divided by the block size."""

    values: Tensor
    scales: Tensor
    format: ElementFormat
    axis: int
    block_size: int

    @property
    def codes(self) -> Tensor:
        """uint8, x's shape: the elements' bit patterns; every NaN has the same."""
        values = torch.where(self.values.isnan(), torch.nan, self.values)
        return values.to(self.format.dtype).view(torch.uint8)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Value times scale: exact in float32 below 2^128, rounded once to `dtype`."""
        blocks = split_blocks(self.values, self.block_size, self.axis)
        scales = decode_scales(self.scales).unsqueeze(self.axis + 1)
        return (blocks * scales).flatten(self.axis, self.axis + 1).to(dtype)


def quantize(
    x: Tensor, fmt: str, block_size: int = 32, axis: int = -1, scale_rule: str = "rceil", rounding: str = "even"
) -> Quantized:
    """x (bf16, fp16 or fp32, any shape) in blocks of `block_size` along `axis`.

    A block with a NaN or an infinity has the scale code 0xFF and decodes to NaN; a zero block has k = -127.
    Raises ConfigError for an unknown format, rule or rounding, another dtype, or an axis that does not divide.
    """
    values, codes, axis = _quantize_blocks(x, fmt, BlockCast(block_size, scale_rule, rounding), axis)
    scales = codes.squeeze(axis + 1).to(torch.uint8)
    return Quantized(values.flatten(axis, axis + 1), scales, FORMATS[fmt], axis, block_size)


def fake_quantize(
    x: Tensor, fmt: str, block_size: int = 32, axis: int = -1, scale_rule: str = "rceil", rounding: str = "even"
) -> Tensor:
    """`quantize` and decode in one: x's dtype and shape."""
    values, codes, axis = _quantize_blocks(x, fmt, BlockCast(block_size, scale_rule, rounding), axis)
    return to_dtype((values * decode_scales(codes)).flatten(axis, axis + 1), x.dtype)


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), and nothing at all where that is x's dtype.

    In torch 2.11 a compiled autograd.Function has zero gradients if a result went through a .to() that changes nothing.
    """
    return x if x.dtype == dtype else x.to(dtype)


def split_blocks(x: Tensor, block_size: int, axis: int) -> Tensor:
    """x with `axis` (not negative) split into [blocks, block_size]; ConfigError where it does not divide."""
    if x.shape[axis] % block_size:
        raise ConfigError(f"block_size: {block_size} does not divide axis {axis} of shape {list(x.shape)}")
    return x.unflatten(axis, (-1, block_size))


def block_absmax_bits(blocks: Tensor, axis: int) -> Tensor:
    """FP32 bits (int32) of the largest magnitude along `axis`, kept as an axis of 1.

    Integers order as magnitudes do, and NaN comes last; a compiled maximum of floats may lose it.
    """
    return (blocks.view(torch.int32) & MAGNITUDE_MASK).amax(axis, keepdim=True)


def scale_codes(bits: Tensor, fmt: ElementFormat, scale_rule: str) -> Tensor:
    """E8M0 codes (int32) of block absmax, given as FP32 bits: k + 127, k clamped to [-127, 127], or 0xFF."""
    exponent = ((bits + look_up(SCALE_RULES, scale_rule, "scale_rule")(fmt)) >> 23) - 127 - fmt.emax
    return torch.where(bits >= EXPONENT_MASK, NAN_SCALE, exponent.clamp(-127, 127) + 127)


def decode_scales(codes: Tensor) -> Tensor:
    """2^(code - 127) in float32, exactly; NaN for 0xFF."""
    codes = codes.to(torch.int32)
    bits = torch.where(codes == 0, HALF_MIN_NORMAL_BITS, codes << 23)
    return torch.where(codes == NAN_SCALE, NAN_BITS, bits).view(torch.float32)


def divide_by_scales(x: Tensor, codes: Tensor) -> Tensor:
    """x / 2^(code - 127) as an exact product; NaN where the code is 0xFF."""
    inverse = torch.where(codes == NAN_SCALE, NAN_SCALE, 254 - codes)
    return x * decode_scales(inverse)


def round_to_grid(x: Tensor, fmt: ElementFormat, rounding: str) -> Tensor:
    """x (fp32) to the nearest value of the format, saturating; NaN stays NaN."""
    x = x.clamp(-fmt.max, fmt.max)
    binade = (x.view(torch.int32) & EXPONENT_MASK).view(torch.float32)  # 2^floor(log2 |x|), 0 for an FP32 subnormal
    step_bits = (binade.clamp_min(2.0**fmt.emin) * 2.0**-fmt.mantissa_bits).view(torch.int32)
    inverse_step = ((254 << 23) - step_bits).view(torch.float32)
    return look_up(ROUNDINGS, rounding, "rounding")(x * inverse_step) * step_bits.view(torch.float32)


def _quantize_blocks(x: Tensor, fmt: str, cast: BlockCast, axis: int) -> tuple[Tensor, Tensor, int]:
    """Values [.., blocks, block_size, ..] float32, scale codes [.., blocks, 1, ..] int32, axis counted from 0."""
    element = look_up(FORMATS, fmt, "format")
    if x.dtype not in QUANTIZABLE:
        raise ConfigError(f"dtype: {x.dtype} cannot be quantised; give float32, bfloat16 or float16")
    if not -x.ndim <= axis < x.ndim:
        raise ConfigError(f"axis: {axis} is not one of shape {list(x.shape)}")
    axis %= x.ndim
    blocks = to_dtype(split_blocks(x, cast.block_size, axis), torch.float32)
    codes = scale_codes(block_absmax_bits(blocks, axis + 1), element, cast.scale_rule)
    return round_to_grid(divide_by_scales(blocks, codes), element, cast.rounding), codes, axis
