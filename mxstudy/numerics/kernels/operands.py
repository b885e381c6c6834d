"""What all operators of this folder share: both operands of a tensor by the numerics, and what a kernel must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.formats import FORMATS, SCALE_RULES, look_up_mx
from mxstudy.numerics.kernels.packing import pack, unpack
from mxstudy.numerics.scales import MANTISSA_BITS
from mxstudy.reader import require

BLOCK_SIZES = (16, 32, 64)
KERNEL_RULES = ("floor", "ceil", "rceil", "even")
ROUNDS = ("even", "away")
KERNEL_FORMATS = ("E4M3", "E5M2", "E3M2", "E2M3", "E2M1")
BF16, FP32 = torch.bfloat16, torch.float32
UNREAD = "unread"  # in place of a format: no GEMM reads that operand, and it is of no elements


@dataclass(frozen=True)
class Casts:
    """How both operands of a tensor are cast: the formats along the rows and along the columns, and a BlockCast."""

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
    """A weight's operands, bf16 and of its shape: of the forward and of dgrad, and how they are cast from it.

    `forward` is a leaf that stands for the weight: its gradient is the weight's (straight-through), in bf16.
    `casts`: packed, as operators take them.
    """

    forward: Tensor
    dgrad: Tensor
    casts: str


class FormatConstants(NamedTuple):
    """What a kernel must know of an element format and the scale rule."""

    rule: int  # what is added to the bits of an absmax before its exponent is taken
    emax: int
    least_normal: int  # the bits of 2^emin in FP32
    mantissa_bits: int
    limit: float | None  # the largest element, where a block may exceed it
    converted: str | None  # the format, where there are conversions to it


class CastConstants(NamedTuple):
    """What a kernel must know of `Casts`; `row` and `column`: None for an operand that is only rounded, or unread."""

    row: FormatConstants | None
    column: FormatConstants | None
    block: int
    away: bool
    pre_round: bool


class Tile(NamedTuple):
    """What one program holds, and how many warps do its work."""

    rows: int
    columns: int
    warps: int


def settings(shape: Sequence[int], row: str | None, column: str | None, cast: BlockCast) -> str:
    """Return `Casts` for an operator on [..., rows, columns], packed.

    Raises ConfigError for what no kernel does: formats without E8M0 scales, other scale rules than those of
    SCALE_RULES, other roundings, other blocks than those of BLOCK_SIZES, and blocks that do not divide their axis.
    """
    check_settings(cast)
    for fmt, axis in ((row, -1), (column, -2)):
        if fmt not in (None, UNREAD):
            look_up_mx(str(fmt))
            require(fmt in KERNEL_FORMATS, f"format: {fmt} has no kernel; take one of {KERNEL_FORMATS}")
            require(
                shape[axis] % cast.block_size == 0,
                f"block_size: {cast.block_size} does not divide axis {axis} of shape {list(shape)}",
            )
    return pack(Casts(row, column, cast.block_size, cast.scale_rule, cast.rounding, cast.operand_pre_round))


def check_settings(cast: BlockCast) -> None:
    """Raise ConfigError for what no kernel does, in whatever format."""
    require(cast.scale_rule in KERNEL_RULES, f"scale_rule: {cast.scale_rule} has no kernel; take one of {KERNEL_RULES}")
    require(cast.rounding in ROUNDS, f"rounding: {cast.rounding} has no kernel; take one of {ROUNDS}")
    require(not cast.pad_blocks, "pad_blocks: kernels have whole blocks; set it to false")
    require(cast.block_size in BLOCK_SIZES, f"block_size: {cast.block_size} has no kernel; take one of {BLOCK_SIZES}")


def both(x: Tensor, casts: str) -> tuple[Tensor, Tensor]:
    """x [..., rows, columns] by the numerics: in blocks along the last axis and along the one before it."""
    c = unpack(Casts, casts)
    return operand(x, c.row, -1, c.block_cast), operand(x, c.column, -2, c.block_cast)


def operand(x: Tensor, fmt: str | None, axis: int, cast: BlockCast) -> Tensor:
    """A new bf16 tensor."""
    if fmt == UNREAD:
        return x.new_empty(0, dtype=BF16)
    return x.to(BF16, copy=True) if fmt is None else block_cast(x, fmt, axis, cast).dequantize(BF16)


def empty_both(x: Tensor, casts: str) -> tuple[Tensor, Tensor]:
    c = unpack(Casts, casts)
    return empty_operand(x, c.row), empty_operand(x, c.column)


def empty_operand(x: Tensor, fmt: str | None) -> Tensor:
    return x.new_empty(0, dtype=BF16) if fmt == UNREAD else torch.empty_like(x, dtype=BF16)


# ------------------------------------------------------------------------------------------------------- for kernels


def constants(casts: str) -> CastConstants:
    """Returns the settings as kernels take them: known when they are compiled."""
    c = unpack(Casts, casts)
    return CastConstants(
        row=format_constants(c.row, c.scale_rule),
        column=format_constants(c.column, c.scale_rule),
        block=c.block_size,
        away=c.rounding == "away",
        pre_round=c.pre_round,
    )


@cache
def is_capable_of(*capability: int) -> bool:
    """Whether kernels are run by a GPU of that compute capability or a later one, or by Triton's interpreter."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= capability


def converted(fmt: str) -> str | None:
    """The format, if it is one that there are conversions to."""
    return fmt if fmt in ("E4M3", "E5M2") and is_capable_of(8, 9) else None


def format_constants(fmt: str | None, scale_rule: str) -> FormatConstants | None:
    """None where nothing is cast.

    A block may exceed the largest element under rules that round k up less often than ceil(log2(absmax / max)) does,
    and under rounded scales.
    """
    if fmt is None or fmt == UNREAD:
        return None
    element = FORMATS[fmt]
    rule, never_exceeds = SCALE_RULES[scale_rule](element), SCALE_RULES["rceil"](element)
    limit = element.max if rule < never_exceeds or element.scale != "E8M0" else None
    least_normal = (element.emin + 127) << MANTISSA_BITS
    return FormatConstants(rule, element.emax, least_normal, element.mantissa_bits, limit, converted(fmt))


def written(operand: Tensor) -> Tensor | None:
    """As a kernel takes it: None for what nobody reads."""
    return operand if operand.numel() else None


def tile_of(rows: int, columns: int, block_size: int, elements: int) -> Tile:
    """At most about so many elements of a matrix that it divides, with blocks whole in it; powers of two for Triton."""
    height = min(power_of_two_in(rows), max(block_size, 32))
    width = max(elements // height, block_size)
    return Tile(height, min(power_of_two_in(columns), width), warps=4)


def power_of_two_in(size: int) -> int:
    """The largest power of two that divides it."""
    return size & -size


def ceil_power_of_two(size: int) -> int:
    """The least that it fits in."""
    return 1 << (size - 1).bit_length()


def launch(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], warps: int, **constants: Any) -> None:
    """On the first argument's device. No product is fused with a sum: torch rounds it in between."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)
