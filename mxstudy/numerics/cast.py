"""The cast: blocks of an axis to small floats that share one scale.

    absmax a of a block -> scale 2^k (a rule of SCALE_RULES) -> x / 2^k, clamped to max -> nearest element value

NVFP4's scale is an E4M3 number instead, relative to one FP32 scale of the whole tensor. Bits are the same on every
device, eager or compiled; overflow is clamped here because float8 casts of torch before 2.13 do not saturate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mxstudy.numerics.formats import CODE_BUMP, FORMATS, SCALE_RULES, ElementFormat, look_up
from mxstudy.numerics.grid import decode, encode, pack_pairs, round_to_bf16_away, round_to_grid, to_dtype, unpack_pairs
from mxstudy.numerics.scales import (
    absmax_bits,
    code_bump,
    decode_scales,
    divide_by_scales,
    nvfp4_block_scales,
    nvfp4_tensor_scale,
    scale_codes,
)
from mxstudy.reader import ConfigError, require

E4M3 = FORMATS["E4M3"]
QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)
CODE_DTYPES = {  # torch's own of one byte each, which is two codes of 4 bits
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
    "E2M1": torch.float4_e2m1fn_x2,
    "NVFP4": torch.float4_e2m1fn_x2,
}


@dataclass(frozen=True)
class BlockCast:
    """How tensors are cut into blocks and rounded; the element format is each operand's own.

    `operand_pre_round`: to bf16 first, ties away from zero; `pad_blocks`: a last block that the axis does not fill is
    filled with zeros, and is else an error. Both as microxcaling does.
    """

    block_size: int = 32
    scale_rule: str = "rceil"
    rounding: str = "even"
    operand_pre_round: bool = False
    pad_blocks: bool = False

    def pre_rounded(self, x: Tensor) -> Tensor:
        """x [...] float32 as its blocks are made of it, and as what exceeds their scales is counted."""
        return round_to_bf16_away(x) if self.operand_pre_round else x


@dataclass(frozen=True)
class Quantized:
    """`values` float32 on the element grid, x's shape; `scales` uint8 E8M0 codes, `axis` divided by the block size.

    The last block may be a part of one.
    NVFP4: `scales` float8_e4m3fn, and the float32 `tensor_scale`, which broadcasts over the scales.
    """

    values: Tensor
    scales: Tensor
    format: ElementFormat
    axis: int
    block_size: int
    tensor_scale: Tensor | None = None

    @property
    def scale_values(self) -> Tensor:
        """What values are multiplied with to decode them: float32, the shape of `scales`."""
        if self.tensor_scale is None:
            return decode_scales(self.scales)
        return to_dtype(self.scales, torch.float32) * self.tensor_scale

    @property
    def codes(self) -> Tensor:
        """uint8, one element a byte and x's shape; of 4 bits two a byte along `axis`, the first in the low nibble."""
        codes = encode(self.values, self.format)
        return pack_pairs(codes, self.axis) if self.format.bits == 4 else codes

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scales: Tensor,
        fmt: str,
        axis: int,
        block_size: int,
        tensor_scale: Tensor | None = None,
    ) -> Quantized:
        """The tensor of which `codes` and `scales` are these: uint8, or torch's dtype of that format.

        Raises ConfigError for other dtypes, for NVFP4 without a tensor scale and for MX with one.
        """
        element, axis = look_up(FORMATS, fmt, "format"), axis % codes.ndim
        codes = bytes_of(codes, "codes", CODE_DTYPES.get(fmt))
        if element.scale == "E8M0":
            require(tensor_scale is None, f"tensor_scale: {fmt} has none; NVFP4 has")
            scales = bytes_of(scales, "scales", torch.float8_e8m0fnu)
        else:
            require(tensor_scale is not None, f"tensor_scale: {fmt} has one beside its block scales; give that")
            scales = bytes_of(scales, "scales", torch.float8_e4m3fn).view(torch.float8_e4m3fn)
        codes = unpack_pairs(codes, axis) if element.bits == 4 else codes
        return cls(decode(codes, element), scales, element, axis, block_size, tensor_scale)

    def without_tensor_scale(self) -> Quantized:
        """Itself with a tensor scale of 1: what a GEMM multiplies before it scales its accumulator."""
        assert self.tensor_scale is not None
        return replace(self, tensor_scale=torch.ones_like(self.tensor_scale))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Value times scale, rounded once to `dtype`; with E8M0 scales exact in float32 below 2^128."""
        blocks = split_blocks(self.values, self.block_size, self.axis, pad=True)
        scales = self.scale_values.unsqueeze(self.axis + 1)
        decoded = join_blocks(blocks * scales, self.axis, self.values.shape[self.axis])
        return to_dtype(decoded, dtype)


def quantize(
    x: Tensor,
    fmt: str,
    block_size: int | None = None,
    axis: int = -1,
    scale_rule: str = "rceil",
    rounding: str = "even",
    tensor_scale: Tensor | float | None = None,
) -> Quantized:
    """x (bf16, fp16 or fp32, any shape) in blocks of `block_size` (32; NVFP4: 16) along `axis`.

    MX: a block with a NaN or an infinity has the scale code 0xFF and decodes to NaN; a zero block has k = -127.
    NVFP4: `tensor_scale` is that of x's absmax if not given; one that is given broadcasts over the scales.
    Raises ConfigError for an unknown format, rule or rounding, another dtype, an axis that does not divide, or a tensor
    scale that is a number, but not positive and finite.
    """
    block_size = block_size_of(fmt, block_size)
    look_up(SCALE_RULES, scale_rule, "scale_rule")
    return block_cast(x, fmt, axis, BlockCast(block_size, scale_rule, rounding), tensor_scale)


def block_size_of(fmt: str, block_size: int | None) -> int:
    """The format's own if none is given; ConfigError for one that is not positive."""
    block_size = look_up(FORMATS, fmt, "format").block_size if block_size is None else block_size
    if block_size < 1:
        raise ConfigError(f"block_size: {block_size} numbers are no block; give at least 1")
    return block_size


def fake_quantize(
    x: Tensor,
    fmt: str,
    block_size: int | None = None,
    axis: int = -1,
    scale_rule: str = "rceil",
    rounding: str = "even",
    tensor_scale: Tensor | float | None = None,
) -> Tensor:
    """`quantize` and decode in one: x's dtype and shape."""
    return quantize(x, fmt, block_size, axis, scale_rule, rounding, tensor_scale).dequantize(x.dtype)


def block_cast(
    x: Tensor, fmt: str, axis: int, cast: BlockCast, tensor_scale: Tensor | float | None = None
) -> Quantized:
    """`quantize` with its options as one, and with microxcaling's, that it has not.

    With CODE_BUMP as the rule, which E4M3 alone has, each element has a scale: the result's block size is 1.
    """
    element = look_up(FORMATS, fmt, "format")
    if x.dtype not in QUANTIZABLE:
        raise ConfigError(f"dtype: {x.dtype} cannot be quantised; give float32, bfloat16 or float16")
    if not -x.ndim <= axis < x.ndim:
        raise ConfigError(f"axis: {axis} is not one of shape {list(x.shape)}")
    axis %= x.ndim
    x = cast.pre_rounded(to_dtype(x, torch.float32))
    blocks = split_blocks(x, cast.block_size, axis, cast.pad_blocks)
    if element.scale == "E4M3":
        return nvfp4_cast(blocks, element, axis, cast, tensor_scale)
    if tensor_scale is not None:
        raise ConfigError(f"tensor_scale: {fmt} has none; NVFP4 has")
    absmax, size = absmax_bits(blocks, axis + 1), x.shape[axis]
    if cast.scale_rule == CODE_BUMP:
        if fmt != E4M3.name:
            raise ConfigError(f"scale_rule: {CODE_BUMP} is for E4M3 alone, not {fmt}; take rceil")
        codes, block_size = scale_codes(absmax, element, "floor", code_bump(blocks, axis)), 1
        scales = join_blocks(codes, axis, size)
    else:
        codes, block_size = scale_codes(absmax, element, cast.scale_rule), cast.block_size
        scales = codes.squeeze(axis + 1)
    values = round_to_grid(divide_by_scales(blocks, codes), element, cast.rounding)
    return Quantized(join_blocks(values, axis, size), scales.to(torch.uint8), element, axis, block_size)


def nvfp4_cast(
    blocks: Tensor, element: ElementFormat, axis: int, cast: BlockCast, tensor_scale: Tensor | float | None
) -> Quantized:
    """Blocks [.., n, 16, ..] fp32. The scales' reciprocal is taken first, as NVIDIA's kernels and torchao do."""
    check_nvfp4(cast)
    absmax = absmax_bits(blocks, axis + 1).view(torch.float32)
    if tensor_scale is None:
        of_all = absmax if absmax.numel() else absmax.new_zeros(1)
        tensor_scale = nvfp4_tensor_scale(absmax_bits(of_all, tuple(range(of_all.ndim))).view(torch.float32).squeeze())
    if not isinstance(tensor_scale, Tensor):
        check_tensor_scale(tensor_scale)
    tensor_scale = torch.as_tensor(tensor_scale, dtype=torch.float32, device=blocks.device)
    spread = tensor_scale.expand(absmax.squeeze(axis + 1).shape).unsqueeze(axis + 1)
    scales = nvfp4_block_scales(absmax, spread)
    reciprocal = torch.ones_like(spread) / spread / scales  # 1 / x compiles to an approximation
    values = round_to_grid(blocks * reciprocal, element, cast.rounding)
    codes = encode(scales.squeeze(axis + 1), FORMATS["E4M3"]).view(torch.float8_e4m3fn)
    return Quantized(values.flatten(axis, axis + 1), codes, element, axis, cast.block_size, tensor_scale)


def check_nvfp4(cast: BlockCast) -> None:
    """Raises ConfigError for what NVFP4 does not have."""
    if cast.block_size != FORMATS["NVFP4"].block_size:
        raise ConfigError(f"block_size: NVFP4 has blocks of 16, not {cast.block_size}")
    if cast.pad_blocks:
        raise ConfigError("pad_blocks: those of NVFP4 have to be whole; set it to false")
    if cast.scale_rule != BlockCast.scale_rule:
        raise ConfigError(
            f"scale_rule: {cast.scale_rule} is for E8M0 scales; those of NVFP4 are E4M3, rounded to nearest"
        )


def check_tensor_scale(scale: float | None) -> None:
    """Raises ConfigError for a number that float32 does not hold, or that is not positive."""
    if scale is not None and not 2.0**-149 <= scale <= torch.finfo(torch.float32).max:
        raise ConfigError(f"tensor_scale: {scale}; give a number that is positive and finite in float32")


def bytes_of(x: Tensor, what: str, dtype: torch.dtype | None) -> Tensor:
    """x, uint8 or of `dtype`, as uint8; ConfigError for another."""
    choices = (torch.uint8,) if dtype is None else (torch.uint8, dtype)
    if x.dtype not in choices:
        raise ConfigError(f"{what}: {x.dtype}; give {' or '.join(map(str, choices))}")
    return x.view(torch.uint8)


def split_blocks(x: Tensor, block_size: int, axis: int, pad: bool = False) -> Tensor:
    """x with `axis` (not negative) split into [blocks, block_size].

    Where it does not divide: the last block filled up with zeros, or without `pad` ConfigError.
    """
    if block_size < 1 or (x.shape[axis] % block_size and not pad):
        raise ConfigError(f"block_size: {block_size} does not divide axis {axis} of shape {list(x.shape)}")
    missing = -x.shape[axis] % block_size
    if missing:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, missing])
    return x.unflatten(axis, (-1, block_size))


def join_blocks(blocks: Tensor, axis: int, size: int) -> Tensor:
    """The inverse: [.., blocks, block_size, ..] with `axis` as long as it was, without zeros that filled it up."""
    joined = blocks.flatten(axis, axis + 1)
    return joined if joined.shape[axis] == size else joined.narrow(axis, 0, size)
