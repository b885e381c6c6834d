"""Cast one operand by any recipe: norm, transform, blocks along an axis or square, rounding to nearest or stochastic.

    ((x - mean) / rms) * gain + bias  ->  Hadamard transform  ->  blocks, E8M0 scales, rounding  ->  bf16

Any step may be missing. A thread holds in its registers what belongs together along the contraction axis, so the
butterfly and the blocks' maxima are elementwise between tensors, and nothing goes through shared memory. Four
neighbours in a row share one draw of random words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, library

from mxstudy.config.casts import Cast
from mxstudy.kernels.operators import (
    BF16,
    BLOCK_SIZES,
    FP32,
    KERNEL_FORMATS,
    KERNEL_RULES,
    FormatConstants,
    ceil_power_of_two,
    format_constants,
    launch,
    power_of_two_in,
)
from mxstudy.kernels.packing import pack, unpack
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.formats import look_up, look_up_mx
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.norm_linear import affine, center, normalize
from mxstudy.numerics.random_bits import RANDOM_BITS, Draws
from mxstudy.numerics.transforms import check_transform, hadamard, inverse_root
from mxstudy.reader import ConfigError, require

STOCHASTIC = "stochastic"
KERNEL_ROUNDINGS = ("even", "away", STOCHASTIC)
KERNEL_TRANSFORMS = (16, 32, 64, 128)
THREADS, WARPS = 128, 4
COLUMN_ELEMENTS = 128  # the most that a thread holds of its columns, which are four at most


@dataclass(frozen=True)
class OperandCast:
    """How one operand is cast.

    `fmt`: None only rounds to bf16. `axis`: the contraction axis, -1 or -2. `square`: blocks are block_size x
    block_size with one scale each. `round_first`: round to bf16 before anything else. `pre_round`: round to bf16, ties
    away from zero, before the blocks are made. `transform_size`: None for no transform.
    """

    fmt: str | None
    axis: int = -1
    block_size: int = 32
    square: bool = False
    scale_rule: str = "rceil"
    rounding: str = "even"
    random_bits: int = 24
    pre_round: bool = False
    round_first: bool = False
    transform_size: int | None = None
    signs_after: bool = False

    @property
    def draws(self) -> bool:
        """Return whether the cast needs random words."""
        return self.fmt is not None and self.rounding == STOCHASTIC

    def as_cast(self) -> Cast:
        """Return the equivalent `Cast` of the reference."""
        return Cast(
            format=str(self.fmt),
            block_size=self.block_size,
            two_dimensional=self.square,
            scale_rule=self.scale_rule,
            rounding=self.rounding,
            random_bits=self.random_bits if self.draws else Cast.random_bits,  # type: ignore[arg-type]
            pre_round=self.pre_round,
            pad=False,
        )

    @property
    def group(self) -> int:
        """Return how many neighbours along the contraction axis depend on one another."""
        return max(self.transform_size or 0, self.block_size if self.fmt else 0, min(BLOCK_SIZES))

    @property
    def part_size(self) -> int:
        """Return the number of elements of a group that one thread holds."""
        limit = 64 if self.axis == -1 else 16 if self.draws else 32  # random words need registers, too
        return min(self.group, limit) if self.fmt else self.group

    @property
    def in_two(self) -> bool:
        """Return whether the transform needs its own launch, because its tile leaves no registers for the blocks."""
        return self.fmt is not None and self.transform_size is not None and self.transform_size > self.part_size


class Groups(NamedTuple):
    """The tile of one program: its groups down and across, and its warps."""

    rows: int
    columns: int
    warps: int = WARPS


class Transform(NamedTuple):
    size: int
    scale: float
    signs_after: bool


class CompiledCast(NamedTuple):
    """A cast as the kernel is compiled for it. `axis`: 0 for the rows' axis. `random_bits`: 0 rounds to nearest."""

    axis: int
    part_size: int
    parts: int
    groups: Groups
    columns: int
    round_first: bool
    transform: Transform | None
    pre_round: bool
    format: FormatConstants | None
    block: int
    square: bool
    away: bool
    random_bits: int


def cast_any(
    x: Tensor,
    cast: OperandCast,
    *,
    mean: Tensor | None = None,
    rms: Tensor | None = None,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    signs: Tensor | None = None,
    draws: Draws | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Return the operand of x: bf16, x's shape.

    x [rows, columns] bf16 or fp32; mean and rms float32 [rows, 1]; gain and bias [columns]; signs float32 [size] of the
    transform; `draws`: the source of the random words, with key [2]. `after` is not read: an argument that depends on a
    gradient keeps the cast in the backward. Raises ConfigError as `check` does.
    """
    check(x, cast)
    require(gain is not None or bias is None, "bias: it is added after the gain; give a gain too")
    require(signs is None or cast.transform_size is not None, "signs: they belong to a transform; give its size")
    require(not cast.draws or draws is not None, "draws: stochastic rounding needs them; give a key and a place")
    require(draws is None or draws.key.ndim == 1, "draws: a stack's key has no kernel; give one replica's key")
    require(
        draws is None or draws.rows is None, "draws: dispatched rows have no kernel; give rows that follow each other"
    )
    key, place = (draws.key, draws.place) if draws is not None and cast.draws else (None, None)
    return _cast_any(x, mean, rms, gain, bias, signs, key, place, after, pack(cast))


def check(x: Tensor, cast: OperandCast) -> None:
    """Raise ConfigError, with what would be right, for a cast that the kernel cannot do with x."""
    if x.ndim != 2 or x.dtype not in (BF16, FP32):
        raise ConfigError(f"x: {list(x.shape)} of {x.dtype} has no kernel; give [rows, columns], bfloat16 or float32")
    if cast.axis not in (-2, -1):
        raise ConfigError(f"axis: {cast.axis} is not an operand's axis; take -1, along the rows, or -2")
    if cast.transform_size is not None:
        check_transform(cast.transform_size, x.shape, cast.axis)
        if cast.transform_size not in KERNEL_TRANSFORMS:
            raise ConfigError(f"transform.size: {cast.transform_size} has no kernel; take one of {KERNEL_TRANSFORMS}")
    if cast.fmt is None:
        if x.shape[cast.axis] % cast.group:
            raise ConfigError(f"axis {cast.axis} of shape {list(x.shape)}: give a multiple of {cast.group}")
        return
    look_up_mx(cast.fmt)
    look_up(dict.fromkeys(KERNEL_FORMATS), cast.fmt, "format")
    look_up(dict.fromkeys(KERNEL_RULES), cast.scale_rule, "scale_rule")
    if cast.rounding not in KERNEL_ROUNDINGS:
        raise ConfigError(f"rounding: {cast.rounding!r} has no kernel; take one of {KERNEL_ROUNDINGS}")
    if cast.random_bits not in RANDOM_BITS:
        raise ConfigError(f"random_bits: {cast.random_bits} has no kernel; take one of {RANDOM_BITS}")
    if cast.block_size not in BLOCK_SIZES:
        raise ConfigError(f"block_size: {cast.block_size} has no kernel; take one of {BLOCK_SIZES}")
    for axis in (-2, -1) if cast.square else (cast.axis,):
        if x.shape[axis] % cast.block_size:
            raise ConfigError(f"block_size: {cast.block_size} does not divide axis {axis} of shape {list(x.shape)}")


@library.custom_op("mxstudy::cast_any", mutates_args=())
def _cast_any(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    key: Tensor | None,
    place: Tensor | None,
    after: Tensor | None,
    packed: str,
) -> Tensor:
    cast = unpack(OperandCast, packed)
    y = center(to_dtype(x, BF16) if cast.round_first else x, mean)
    y = y if rms is None else normalize(y, rms)
    y = to_dtype(y, FP32)
    y = y if gain is None else affine(y, gain, bias)
    if cast.transform_size is not None:
        y = hadamard(y, cast.transform_size, signs, axis=cast.axis, signs_after=cast.signs_after)
    if cast.fmt is None:
        return y.to(BF16, copy=True).contiguous()
    draws = None if key is None or place is None else Draws(key, place)
    return quantize_as(y, cast.as_cast(), cast.axis, draws=draws).dequantize(BF16).contiguous()


@_cast_any.register_fake
def _(x: Tensor, *options: object) -> Tensor:
    return x.new_empty(x.shape, dtype=BF16)


@_cast_any.register_kernel("cuda")
def launch_cuda(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    key: Tensor | None,
    place: Tensor | None,
    after: Tensor | None,
    packed: str,
    groups: Groups | None = None,
) -> Tensor:
    """Launch the kernel. `groups`: a tile other than the usual one, with whole square blocks.

    The result does not depend on the tile.
    """
    from mxstudy.kernels.device.cast_any import cast_any_kernel

    cast, (rows, columns) = unpack(OperandCast, packed), x.shape
    if cast.in_two:
        first, second = replace(cast, fmt=None), replace(cast, transform_size=None, round_first=False)
        y = launch_cuda(x, mean, rms, gain, bias, signs, None, None, None, pack(first))
        return launch_cuda(y, None, None, None, None, None, key, place, None, pack(second), groups)
    compiled_for = compiled_cast(cast, columns, groups)
    result = x.new_empty(x.shape, dtype=BF16)
    high, wide = (1, cast.group) if cast.axis == -1 else (cast.group, 1)
    tiles = -(-rows // (high * compiled_for.groups.rows)), -(-columns // (wide * compiled_for.groups.columns))
    tensors = (x, mean, rms, gain, bias, signs, key, place)
    launch(
        cast_any_kernel,
        (tiles[0] * tiles[1],),
        (*(None if t is None else t.contiguous() for t in tensors), result, rows),
        compiled_for.groups.warps,
        CAST=compiled_for,
    )
    return result


def compiled_cast(cast: OperandCast, columns: int, groups: Groups | None = None) -> CompiledCast:
    """Return the cast as the kernel is compiled for it. It has no rows, because they differ between micro-batches."""
    size = cast.transform_size
    return CompiledCast(
        axis=cast.axis + 2,
        part_size=cast.part_size,
        parts=cast.group // cast.part_size,
        groups=groups or groups_of(cast, columns),
        columns=columns,
        round_first=cast.round_first,
        transform=None if size is None else Transform(size, inverse_root(size), cast.signs_after),
        pre_round=cast.pre_round,
        format=format_constants(cast.fmt, cast.scale_rule),
        block=cast.block_size,
        square=cast.square,
        away=cast.rounding == "away",
        random_bits=cast.random_bits if cast.draws else 0,
    )


def groups_of(cast: OperandCast, columns: int) -> Groups:
    """Return the usual tile: along a row one group per thread, along a column one to four side by side per thread."""
    smallest = cast.block_size if cast.square and cast.fmt else 1
    if cast.axis == -1:
        beside = min(power_of_two_in(columns // cast.group), THREADS // smallest)
        return Groups(THREADS // beside, beside)
    per_thread = max(1, min(4, COLUMN_ELEMENTS // cast.part_size))
    return Groups(1, min(per_thread * THREADS, max(ceil_power_of_two(columns), smallest, 4)))
