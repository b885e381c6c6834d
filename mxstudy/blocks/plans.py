"""How a fused block makes the operands of its linears: worked out once, when a block gets its precision.

A plain cast with the block's own settings is fused with the kernel that makes the tensor. Any other cast is a kernel
of its own, which reads the tensor in bf16: `cast_one` for a plain cast, `cast_any` for one that is random, square,
transformed, with a headroom or below a scale of the whole tensor, and `cast_blocks` for one with FP32 block scales.

A compiled block reads its plans as values. To trace how they follow from the recipes would take seconds per block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mxstudy.config.casts import OPERANDS, SETTINGS, BlockCast, Cast, Gemms, Hadamard
from mxstudy.kernels.cast_any_both import has_both
from mxstudy.kernels.implements import Implements
from mxstudy.kernels.operand_cast import KERNEL_BLOCKS, KERNEL_SCALES, OperandCast
from mxstudy.kernels.operators import BLOCK_SIZES, KERNEL_FORMATS, KERNEL_RULES, ROUNDS, UNREAD

PLAIN = Implements(
    "fused kernels",
    cast={
        "format": KERNEL_FORMATS,
        "block_size": BLOCK_SIZES,
        "scale_rule": KERNEL_RULES,
        "rounding": ROUNDS,
        "pre_round": (False, True),
        "pad": (False,),
    },
)
# What a kernel of its own casts outside blocks (`mxstudy.blocks.operands.plain_operand`).
ALONE = replace(PLAIN, name="kernels of single casts", cast={**PLAIN.cast, "pad": (False, True)})
ANY = Implements(
    "fused kernels",
    cast={
        **PLAIN.cast,
        "block_size": KERNEL_BLOCKS,
        "rounding": (*ROUNDS, "stochastic"),
        "random_bits": (8, 24),
        "two_dimensional": (False, True),
        "headroom": (float,),
        "scale": tuple(KERNEL_SCALES),
    },
    transforms={"size": (16, 32, 64, 128), "signs": ("none", "seed", "step", "call"), "signs_after": (False, True)},
    scales={
        "E4M3": {
            "format": KERNEL_SCALES["E4M3"],
            "scale_rule": (None,),
            "outer_scale": ("none", "tensor"),
            "chain": ("training",),
            "largest_scale": (448.0, 256.0),
            "candidates": (tuple,),
            "candidate_error": ("mse", "mae"),
        },
        "FP32": {"scale_rule": (None,), "pad": (False, True), "headroom": (1.0,)},
        "none": {
            "block_size": (None,),
            "scale_rule": (None,),
            "pad": (None,),
            "outer_scale": ("tensor",),
            "headroom": (1.0,),
        },
    },
)
# The operands along the rows, each with the operand of the same tensor along the columns.
ALONG_COLUMNS = {"forward_x": "wgrad_x", "forward_w": "dgrad_w", "dgrad_dh": "wgrad_dh"}


@dataclass(frozen=True)
class OperandPlan:
    """How an operand is made. `cast`, `transform`: those of its recipe.

    `is_fused`: whether the kernel that makes the tensor also makes the operand. `fused_format`: the format to which
    that kernel casts, or None for bf16, which is either the operand itself or what the operand's own kernel reads.
    `plain`: the settings for `cast_one`, or None if `own` says how `cast_any` or `cast_blocks` makes the operand.
    `round_first`: round to bf16 before anything else. `shares_absmax`: whether both operands of the tensor are below
    the absmax of the same numbers, which one pass finds for the two.
    """

    cast: Cast | None
    transform: Hadamard | None
    is_fused: bool
    fused_format: str | None
    plain: BlockCast | None
    own: OperandCast | None
    axis: int
    round_first: bool
    shares_absmax: bool


@dataclass(frozen=True)
class LinearPlan:
    """The plans of a linear's operands. `casts_dh_at_once`: whether one kernel makes both from a dH that exists."""

    forward_x: OperandPlan
    forward_w: OperandPlan
    dgrad_dh: OperandPlan
    dgrad_w: OperandPlan
    wgrad_dh: OperandPlan
    wgrad_x: OperandPlan
    casts_dh_at_once: bool

    @property
    def gradient_formats(self) -> tuple[str | None, str | None]:
        """Return the formats of dH for dgrad and wgrad in the kernel that makes dH; one bf16 tensor serves for both."""
        row, column = self.dgrad_dh.fused_format, self.wgrad_dh.fused_format
        return row, UNREAD if row is None and column is None else column


def plan_of(gemms: Gemms, settings: BlockCast) -> LinearPlan:
    """Return the plans of a recipe in a block whose kernels cast with these settings."""
    plans = {name: plan_of_operand(gemms, name, settings) for name in OPERANDS}
    dh = plans["dgrad_dh"], plans["wgrad_dh"]
    at_once = dh[0].shares_absmax and all(plan.own is not None and has_both(plan.own) for plan in dh)
    return LinearPlan(**plans, casts_dh_at_once=at_once)


def plan_of_operand(gemms: Gemms, name: str, settings: BlockCast) -> OperandPlan:
    """Return the plan of one operand; the arguments are those of `plan_of`, and a name of OPERANDS."""
    cast, transform = gemms.cast_of(name), gemms.transform_of(name)
    axis, round_first = -1 if name in ALONG_COLUMNS else -2, name.endswith("_w")
    is_plain = transform is None and (cast is None or not any(PLAIN.lacked_in(cast)))
    plain = (BlockCast() if cast is None else settings_of(cast)) if is_plain else None
    is_fused = is_plain and (cast is None or plain == settings)
    return OperandPlan(
        cast,
        transform,
        is_fused=is_fused,
        fused_format=cast.format if cast is not None and is_fused else None,
        plain=plain,
        own=None if is_plain else any_cast(cast, transform, axis, round_first),
        axis=axis,
        round_first=round_first,
        shares_absmax=shares_absmax(gemms, name),
    )


def shares_absmax(gemms: Gemms, name: str) -> bool:
    """Return whether that operand, which is along the rows, and the other one of its tensor share one absmax.

    A transform or a pre-rounding changes the absmax, so an operand that alone has one needs its own pass; and two
    transforms are along different axes.
    """
    if name not in ALONG_COLUMNS:
        return False
    both = name, ALONG_COLUMNS[name]
    row, column = map(gemms.cast_of, both)
    return (
        row is not None
        and column is not None
        and row.outer_scale == column.outer_scale == "tensor"
        and row.pre_round == column.pre_round
        and not any(map(gemms.transform_of, both))
    )


def any_cast(cast: Cast | None, transform: Hadamard | None, axis: int, round_first: bool) -> OperandCast:
    """Return how `cast_any` or `cast_blocks` makes an operand with that cast and transform."""
    turned = None if transform is None else transform.size, transform is not None and transform.signs_after
    if cast is None:
        return OperandCast(None, axis, round_first=round_first, transform_size=turned[0], signs_after=turned[1])
    return OperandCast(
        cast.format,
        axis,
        block_size=cast.block_size or min(BLOCK_SIZES),
        square=cast.two_dimensional,
        scale_rule=str(cast.scale_rule),
        rounding=str(cast.rounding),
        random_bits=cast.random_bits,
        pre_round=bool(cast.pre_round),
        round_first=round_first,
        transform_size=turned[0],
        signs_after=turned[1],
        scale=cast.scale,
        outer_scale=cast.outer_scale,
        chain=cast.chain,
        pad=bool(cast.pad),
        headroom=cast.headroom,
        largest_scale=cast.largest_scale,
        candidates=cast.candidates,
        candidate_error=cast.candidate_error,
    )


def kernel_settings(cast: BlockCast) -> BlockCast:
    """Return the run's settings for fused kernels: the default replaces a value that these kernels do not support.

    No operand changes: a cast with such a value is made by its own kernel, or keeps the block from running fused.
    """
    unknown = [setting for field, setting in SETTINGS.items() if getattr(cast, setting) not in PLAIN.cast[field]]
    return replace(cast, **{setting: getattr(BlockCast(), setting) for setting in unknown})


def settings_of(cast: Cast) -> BlockCast:
    """Return the run's settings under which a cast with all fields open would become this one."""
    return BlockCast(
        cast.block_size or 0, str(cast.scale_rule), str(cast.rounding), bool(cast.pre_round), bool(cast.pad)
    )
