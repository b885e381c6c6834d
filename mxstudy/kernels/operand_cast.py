"""How one operand is cast, by any recipe that a kernel computes, and what a kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mxstudy.compat.torch_compiler import constant
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
    power_of_two_in,
)
from mxstudy.kernels.packing import pack, unpack
from mxstudy.numerics.cast import reach_of
from mxstudy.numerics.formats import look_up, look_up_mx
from mxstudy.numerics.random_bits import RANDOM_BITS
from mxstudy.numerics.transforms import check_axis, check_transform, inverse_root
from mxstudy.reader import ConfigError, require

STOCHASTIC = "stochastic"
KERNEL_ROUNDINGS = ("even", "away", STOCHASTIC)
KERNEL_TRANSFORMS = (16, 32, 64, 128)
KERNEL_BLOCKS = (*BLOCK_SIZES, 128)
KERNEL_SCALES = {  # block scales, and elements below them
    "E8M0": KERNEL_FORMATS,
    "E4M3": (*KERNEL_FORMATS, "NVFP4"),
    "FP32": KERNEL_FORMATS,
    "none": KERNEL_FORMATS,
}
KERNEL_CHAINS = {  # and outer scales
    "E8M0": ("inference", ("none",)),
    "E4M3": ("training", ("none", "tensor")),
    "FP32": ("inference", ("none",)),
    "none": ("inference", ("tensor",)),
}
THREADS, WARPS = 128, 4
SATURATING = "floor"  # a scale rule under which the largest element of a block may be beyond the format's
COLUMN_ELEMENTS = 128  # the most that a thread holds of its columns, which are four at most


@dataclass(frozen=True)
class OperandCast:
    """How one operand is cast.

    `fmt`: None only rounds to bf16. `axis`: the contraction axis, -1 or -2. `square`: blocks are block_size x
    block_size with one scale each. `round_first`: round to bf16 before anything else. `pre_round`: round to bf16, ties
    away from zero, before the blocks are made. `transform_size`: None for no transform. `scale`: the format of block
    scales; the rule is for E8M0. `outer_scale`, `chain`: those of a `Cast`, where E4M3 scales have the training chain,
    alone or below a scale of the whole tensor. Without block scales there is that scale alone, and `block_size` is the
    number of neighbours that a thread holds. `pad`: fill an incomplete last block with zeros, which only FP32 scales
    have (`cast_blocks`). `headroom`: the fraction of the format's range that is used; only E8M0 and E4M3 scales have
    one. `largest_scale`, `candidates`, `candidate_error`: those of a `Cast`, for E4M3 scales.
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
    scale: str = "E8M0"
    outer_scale: str = "none"
    chain: str = "inference"
    pad: bool = False
    headroom: float = 1.0
    largest_scale: float = Cast.largest_scale
    candidates: tuple[float, ...] = Cast.candidates
    candidate_error: str = Cast.candidate_error
    packed: str = field(init=False, repr=False, compare=False)  # for an operator; a compiler reads it as one value

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", pack(self))

    @property
    def draws(self) -> bool:
        """Return whether the cast needs random words."""
        return self.fmt is not None and self.rounding == STOCHASTIC

    def as_cast(self) -> Cast:
        """Return the equivalent `Cast` of the reference."""
        return Cast(
            format=str(self.fmt),
            scale=self.scale,  # type: ignore[arg-type]
            block_size=self.block_size if self.scale != "none" else None,
            two_dimensional=self.square,
            scale_rule=self.scale_rule if self.scale == "E8M0" else None,
            outer_scale=self.outer_scale,  # type: ignore[arg-type]
            chain=self.chain,  # type: ignore[arg-type]
            rounding=self.rounding,
            random_bits=self.random_bits if self.draws else Cast.random_bits,  # type: ignore[arg-type]
            pre_round=self.pre_round,
            pad=self.pad if self.scale != "none" else None,
            headroom=self.headroom,
            largest_scale=self.largest_scale,
            candidates=self.candidates,
            candidate_error=self.candidate_error,  # type: ignore[arg-type]
        )

    @property
    def has_outer(self) -> bool:
        """Return whether the cast needs the absmax of the whole tensor."""
        return self.outer_scale != "none"

    @property
    def chooses(self) -> bool:
        """Return whether each block takes one of several scales."""
        return len(self.candidates) > 1

    @property
    def group(self) -> int:
        """Return how many neighbours along the contraction axis depend on one another."""
        return max(self.transform_size or 0, self.block_size if self.fmt else 0, min(BLOCK_SIZES))

    @property
    def part_size(self) -> int:
        """Return the number of elements of a group that one thread holds; it chooses a scale for a whole block."""
        limit = 64 if self.axis == -1 else 16 if self.draws else 32  # random words need registers, too
        return min(self.group, limit) if self.fmt and not self.chooses else self.group

    @property
    def in_two(self) -> bool:
        """Return whether the transform needs its own launch, because its tile leaves no registers for the blocks."""
        size = self.transform_size
        return self.fmt is not None and size is not None and (size > self.part_size or self.chooses)

    @property
    def halves(self) -> tuple[OperandCast, OperandCast]:
        """Return the cast's part up to the transform, whose result is exact in bf16, and the part after it."""
        first = OperandCast(
            None,
            self.axis,
            round_first=self.round_first,
            transform_size=self.transform_size,
            signs_after=self.signs_after,
        )
        return first, replace(self, transform_size=None, round_first=False)


class Groups(NamedTuple):
    """The tile of one program: its groups down and across, and its warps."""

    rows: int
    columns: int
    warps: int = WARPS


class Transform(NamedTuple):
    size: int
    scale: float
    signs_after: bool


class E4M3Scales(NamedTuple):
    """E4M3 block scales as the kernel is compiled for them: the numbers of `scales.e4m3_training_scales`."""

    format: FormatConstants | None
    largest: float  # the product of the largest element and the largest scale
    inverse: float  # the inverse of the largest element, rounded to FP32
    unit: float  # the inverse of `largest`


class CompiledCast(NamedTuple):
    """A cast as the kernel is compiled for it. `axis`: 0 for the rows' axis. `random_bits`: 0 rounds to nearest.

    `e4m3`: None for other scales than those. `fp32`: the largest element below FP32 scales, of blocks or of the tensor,
    or None. `headroom`: the factor on elements over their E8M0 scale, or None.
    """

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
    e4m3: E4M3Scales | None
    fp32: float | None
    headroom: float | None
    candidates: tuple[float, ...]
    absolute_error: bool


def checked_cast(
    x: Tensor,
    cast: OperandCast,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    signs: Tensor | None = None,
) -> str:
    """Return the packed cast. Raises ConfigError, with what would be right, if the kernel cannot do it with x."""
    require(gain is not None or bias is None, "bias: it is added after the gain; give a gain too")
    require(signs is None or cast.transform_size is not None, "signs: they belong to a transform; give its size")
    if x.ndim != 2 or x.dtype not in (BF16, FP32):
        raise ConfigError(f"x: {list(x.shape)} of {x.dtype} has no kernel; give [rows, columns], bfloat16 or float32")
    if cast.transform_size is not None:
        check_transform(cast.transform_size, x.shape, cast.axis)
    check_options(cast.packed)
    if cast.fmt is None and x.shape[cast.axis] % cast.group:
        raise ConfigError(f"axis {cast.axis} of shape {list(x.shape)}: give a multiple of {cast.group}")
    has_blocks = cast.fmt is not None and cast.scale != "none"
    if has_blocks and not cast.pad and (axis := incomplete_axis(x, cast)) is not None:
        raise ConfigError(f"block_size: {cast.block_size} does not divide axis {axis} of shape {list(x.shape)}")
    return cast.packed


@constant
def check_options(packed: str) -> None:
    """Raise ConfigError, with what would be right, for a packed cast that no kernel does with any tensor."""
    cast = unpack(OperandCast, packed)
    check_axis(cast.axis)
    if cast.transform_size is not None and cast.transform_size not in KERNEL_TRANSFORMS:
        raise ConfigError(f"transform.size: {cast.transform_size} has no kernel; take one of {KERNEL_TRANSFORMS}")
    if cast.fmt is None:
        return
    formats = look_up(KERNEL_SCALES, cast.scale, "scale")
    chain, outer_scales = KERNEL_CHAINS[cast.scale]
    require(cast.chain == chain, f"chain: {cast.chain} has no kernel for {cast.scale} scales; take {chain}")
    look_up(dict.fromkeys(outer_scales), cast.outer_scale, "outer_scale")
    require(cast.scale == "E4M3" or not cast.chooses, f"candidates: {cast.scale} scales have no kernel with several")
    if cast.scale == "E8M0":
        look_up_mx(cast.fmt)
        look_up(dict.fromkeys(KERNEL_RULES), cast.scale_rule, "scale_rule")
    look_up(dict.fromkeys(formats), cast.fmt, "format")
    if cast.rounding not in KERNEL_ROUNDINGS:
        raise ConfigError(f"rounding: {cast.rounding!r} has no kernel; take one of {KERNEL_ROUNDINGS}")
    if cast.random_bits not in RANDOM_BITS:
        raise ConfigError(f"random_bits: {cast.random_bits} has no kernel; take one of {RANDOM_BITS}")
    if cast.block_size not in KERNEL_BLOCKS:
        raise ConfigError(f"block_size: {cast.block_size} has no kernel; take one of {KERNEL_BLOCKS}")
    require(
        cast.scale in ("E8M0", "E4M3") or cast.headroom == 1,
        f"headroom: it has no kernel with scale={cast.scale}; leave it out",
    )
    require(cast.scale == "FP32" or not cast.pad, f"pad: {cast.scale} scales have no kernel that pads; set it to false")


def incomplete_axis(x: Tensor, cast: OperandCast) -> int | None:
    """Return the first axis of x that the cast's blocks do not divide, or None."""
    for axis in (-2, -1) if cast.square else (cast.axis,):
        if x.shape[axis] % cast.block_size:
            return axis
    return None


@cache
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
        format=format_constants(cast.fmt, cast.scale_rule if cast.scale == "E8M0" else SATURATING),
        block=cast.block_size,
        square=cast.square,
        away=cast.rounding == "away",
        random_bits=cast.random_bits if cast.draws else 0,
        e4m3=e4m3_scales(cast) if cast.scale == "E4M3" else None,
        fp32=reach_of(cast.as_cast()) if cast.scale in ("FP32", "none") else None,
        candidates=cast.candidates,
        absolute_error=cast.candidate_error == "mae",
        headroom=cast.headroom if cast.fmt and cast.scale == "E8M0" and cast.headroom < 1 else None,
    )


def e4m3_scales(cast: OperandCast) -> E4M3Scales:
    settings = cast.as_cast()
    reach = reach_of(settings)
    largest = reach * settings.largest_scale
    return E4M3Scales(format_constants("E4M3", SATURATING), largest, float(np.float32(1 / reach)), 1 / largest)


def groups_of(cast: OperandCast, columns: int) -> Groups:
    """Return the usual tile: along a row one group per thread, along a column one to four side by side per thread."""
    smallest = cast.block_size if cast.square and cast.fmt else 1
    if cast.axis == -1:
        beside = min(power_of_two_in(columns // cast.group), THREADS // smallest)
        return Groups(THREADS // beside, beside)
    per_thread = max(1, min(4, COLUMN_ELEMENTS // cast.part_size))
    return Groups(1, min(per_thread * THREADS, max(ceil_power_of_two(columns), smallest, 4)))
