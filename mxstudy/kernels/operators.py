"""What all operators of this folder share: both operands by the numerics, and the compile-time constants of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy.compat.torch_compiler import constant
from mxstudy.kernels.packing import pack, unpack
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.formats import FORMATS, SCALE_RULES, look_up_mx
from mxstudy.numerics.scales import MANTISSA_BITS
from mxstudy.reader import ConfigError, require

BLOCK_SIZES = (16, 32, 64)
KERNEL_RULES = ("floor", "ceil", "rceil", "even")
ROUNDS = ("even", "away")
KERNEL_FORMATS = ("E4M3", "E5M2", "E3M2", "E2M3", "E2M1", "E1M2")
BF16, FP32 = torch.bfloat16, torch.float32
ENOUGH = 128  # programs that keep a GPU of 132 multiprocessors busy; fewer large tiles than that become small ones
UNREAD = "unread"  # in place of a format: no GEMM reads that operand, and it is an empty tensor


@dataclass(frozen=True)
class Casts:
    """How both operands of a tensor are cast: formats along the rows and the columns, and a BlockCast's fields."""

    row: str | None
    column: str | None
    block_size: int
    scale_rule: str
    rounding: str
    pre_round: bool

    @property
    def block_cast(self) -> BlockCast:
        return BlockCast(self.block_size, self.scale_rule, self.rounding, self.pre_round)


class Held(NamedTuple):
    """The operands of a weight, bf16 and of its shape, for the forward and for dgrad, and how they are cast from it.

    `forward` is a leaf that stands for the weight: its gradient is the weight's (straight-through), in bf16.
    `casts`: packed, as operators take them.
    """

    forward: Tensor
    dgrad: Tensor
    casts: str


class FormatConstants(NamedTuple):
    """An element format and the scale rule as a kernel is compiled for them."""

    rule: int  # what is added to the bits of an absmax before its exponent is taken
    emax: int
    least_normal: int  # the bits of 2^emin in FP32
    mantissa_bits: int
    limit: float | None  # the largest element if a block may exceed it, else None
    converted: str | None  # the format if the GPU has conversions to it, else None


class CastConstants(NamedTuple):
    """`Casts` as a kernel is compiled for them. `row`, `column`: None for an operand that is only rounded or unread.

    `pairs`: whether bf16 values are cast two at a time.
    """

    row: FormatConstants | None
    column: FormatConstants | None
    block: int
    away: bool
    pre_round: bool
    pairs: bool


class Tile(NamedTuple):
    """The rows and columns that one program holds, and its number of warps."""

    rows: int
    columns: int
    warps: int


def checked_casts(shape: Sequence[int], row: str | None, column: str | None, cast: BlockCast) -> str:
    """Return packed `Casts` for an operator on [..., rows, columns].

    Raises ConfigError for what no kernel does: formats without E8M0 scales, scale rules not in KERNEL_RULES, roundings
    not in ROUNDS, block sizes not in BLOCK_SIZES, and blocks that do not divide their axis.
    """
    rules = cast.scale_rule, cast.rounding, cast.operand_pre_round
    casts = _checked_casts(row, column, cast.block_size, *rules, cast.pad_blocks)
    for fmt, axis in ((row, -1), (column, -2)):
        if fmt is not None and fmt != UNREAD and shape[axis] % cast.block_size:
            raise ConfigError(f"block_size: {cast.block_size} does not divide axis {axis} of shape {list(shape)}")
    return casts


@constant
def _checked_casts(row: str | None, column: str | None, *settings: Any) -> str:
    """Return packed `Casts`, checked but for the shape; `settings`: a BlockCast's fields."""
    cast = BlockCast(*settings)
    check_settings(cast)
    for fmt in (row, column):
        if fmt not in (None, UNREAD):
            look_up_mx(str(fmt))
            require(fmt in KERNEL_FORMATS, f"format: {fmt} has no kernel; take one of {KERNEL_FORMATS}")
    return pack(Casts(row, column, cast.block_size, cast.scale_rule, cast.rounding, cast.operand_pre_round))


def check_settings(cast: BlockCast) -> None:
    """Raise ConfigError for settings that no kernel supports in any format."""
    require(cast.scale_rule in KERNEL_RULES, f"scale_rule: {cast.scale_rule} has no kernel; take one of {KERNEL_RULES}")
    require(cast.rounding in ROUNDS, f"rounding: {cast.rounding} has no kernel; take one of {ROUNDS}")
    require(not cast.pad_blocks, "pad_blocks: kernels need complete blocks; set it to false")
    require(cast.block_size in BLOCK_SIZES, f"block_size: {cast.block_size} has no kernel; take one of {BLOCK_SIZES}")


def both(x: Tensor, casts: str) -> tuple[Tensor, Tensor]:
    """Return both operands of x [..., rows, columns] by the numerics: blocks along the last axis and the one before."""
    c = unpack(Casts, casts)
    return operand(x, c.row, -1, c.block_cast), operand(x, c.column, -2, c.block_cast)


def operand(x: Tensor, fmt: str | None, axis: int, cast: BlockCast) -> Tensor:
    """Return one operand as a new bf16 tensor, contiguous like those of kernels."""
    if fmt == UNREAD:
        return x.new_empty(0, dtype=BF16)
    if fmt is None:
        return x.to(BF16, copy=True, memory_format=torch.contiguous_format)
    return block_cast(x, fmt, axis, cast).dequantize(BF16).contiguous()


def empty_both(x: Tensor, casts: str) -> tuple[Tensor, Tensor]:
    c = unpack(Casts, casts)
    return empty_operand(x, c.row), empty_operand(x, c.column)


def empty_operand(x: Tensor, fmt: str | None) -> Tensor:
    return x.new_empty(0 if fmt == UNREAD else x.shape, dtype=BF16)


# ------------------------------------------------------------------------------------------------------- for kernels


@cache  # a step of a small model launches so many kernels that the host's time counts
def constants(casts: str) -> CastConstants:
    """Return the packed casts as kernels are compiled for them."""
    c = unpack(Casts, casts)
    return CastConstants(
        row=format_constants(c.row, c.scale_rule),
        column=format_constants(c.column, c.scale_rule),
        block=c.block_size,
        away=c.rounding == "away",
        pre_round=c.pre_round,
        pairs=c.rounding == "even" and is_capable_of(9, 0),
    )


@cache
def is_capable_of(*capability: int) -> bool:
    """Return whether kernels run on a GPU of that compute capability or later, or in Triton's interpreter."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= capability


def converted(fmt: str) -> str | None:
    """Return the format if this GPU converts to it in hardware, else None."""
    return fmt if fmt in ("E4M3", "E5M2") and is_capable_of(8, 9) else None


def format_constants(fmt: str | None, scale_rule: str) -> FormatConstants | None:
    """Return the format and scale rule as kernels are compiled for them, or None if nothing is cast.

    A block may exceed the largest element under rules that round k up less often than ceil(log2(absmax / max)), and
    under rounded scales.
    """
    if fmt is None or fmt == UNREAD:
        return None
    element = FORMATS[fmt]
    rule, never_exceeds = SCALE_RULES[scale_rule](element), SCALE_RULES["rceil"](element)
    limit = element.max if rule < never_exceeds or element.scale != "E8M0" else None
    least_normal = (element.emin + 127) << MANTISSA_BITS
    return FormatConstants(rule, element.emax, least_normal, element.mantissa_bits, limit, converted(fmt))


def argument_of(operand: Tensor) -> Tensor | None:
    """Return the operand as a kernel's argument: None if nobody reads it."""
    return operand if operand.numel() else None


def tile_of(rows: int, columns: int, block_size: int, elements: int = 2048) -> Tile:
    """Return a tile of about `elements` at most that divides the matrix, with whole blocks and power-of-two sides."""
    height = min(power_of_two_in(rows), max(block_size, 32))
    width = max(elements // height, block_size)
    return Tile(height, min(power_of_two_in(columns), width), warps=4)


def tile_of_gradient(rows: int, columns: int, *casts: CastConstants) -> Tile:
    """Return a tile for a kernel that computes much per number, rounds it to bf16, and casts it.

    A warp has as many numbers as a block of 32 x 32, so that few threads wait for others; without casts a tile is wide.
    """
    if not any(cast.row or cast.column for cast in casts):
        height = min(power_of_two_in(rows), 4)
        return Tile(height, min(power_of_two_in(columns), 1024 // height), warps=4)
    if casts[0].pairs and casts[0].block <= 32:
        width = min(power_of_two_in(columns), 64)
        return Tile(min(power_of_two_in(rows), 32), width, warps=max(1, width // 32))
    return tile_of(rows, columns, casts[0].block)


def check_tile(side: str, of_tile: int, size: int) -> None:
    """Raise ConfigError if a tile's side, "rows" or "columns", does not divide that of the tensor.

    A kernel would leave the rest uncomputed, or read beyond the tensor.
    """
    require(size % of_tile == 0, f"tile: {of_tile} {side} do not divide {size}; take a number of {side} that does")


def power_of_two_in(size: int) -> int:
    """Return the largest power of two that divides `size`."""
    return size & -size


def ceil_power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], warps: int, **constants: Any) -> None:
    """Launch the kernel on the first argument's device, without fusing products with sums: torch rounds in between."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)
