"""The operands of a fused block, each made by the cheapest kernel that computes its cast.

A plain cast with the block's own settings is fused with the kernel that makes the tensor. Any other cast is a kernel
of its own, which reads the tensor in bf16: `cast_one` for a plain cast, `cast_any` for one that is random, square,
transformed, with a headroom or below a scale of the whole tensor, and `cast_blocks` for one with FP32 block scales.
Where both operands of a tensor are below the scale of the tensor, its absmax is found in one pass for the two
(`shared_absmax`), and `cast_any_both` makes both of a gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mxstudy.config.casts import SETTINGS, BlockCast, Cast, Hadamard
from mxstudy.kernels import absmax_any, cast_any, cast_any_both, cast_blocks, cast_both, cast_one
from mxstudy.kernels.cast_any_both import has_both
from mxstudy.kernels.implements import Implements
from mxstudy.kernels.operand_cast import KERNEL_BLOCKS, KERNEL_SCALES, OperandCast
from mxstudy.kernels.operators import BLOCK_SIZES, KERNEL_FORMATS, KERNEL_RULES, ROUNDS, UNREAD
from mxstudy.numerics.cast import scale_above, scale_of_result
from mxstudy.numerics.gathered_weight import GatheredWeight
from mxstudy.numerics.gemms import Linear, Operand
from mxstudy.numerics.random_bits import signs_of

PLAIN = Implements(
    cast={
        "format": KERNEL_FORMATS,
        "block_size": BLOCK_SIZES,
        "scale_rule": KERNEL_RULES,
        "rounding": ROUNDS,
        "pre_round": (False, True),
        "pad": (False,),
    }
)
ANY = Implements(
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
# The other operand, along the columns, of the tensor whose operand along the rows has that name.
ALONG_COLUMNS = {"forward_x": "wgrad_x", "forward_w": "dgrad_w", "dgrad_dh": "wgrad_dh"}


def kernel_settings(cast: BlockCast) -> BlockCast:
    """Return the run's settings for kernels; the default replaces a value that no kernel has.

    That changes no operand, because a cast with such a value has a kernel of its own, or none.
    """
    unknown = [setting for field, setting in SETTINGS.items() if getattr(cast, setting) not in PLAIN.cast[field]]
    return replace(cast, **{setting: getattr(BlockCast(), setting) for setting in unknown})


def settings_of(cast: Cast) -> BlockCast:
    """Return the run's settings under which a cast with all fields open would become this one."""
    return BlockCast(
        cast.block_size or 0, str(cast.scale_rule), str(cast.rounding), bool(cast.pre_round), bool(cast.pad)
    )


def is_fused(linear: Linear, name: str, settings: BlockCast) -> bool:
    """Return whether the kernel that makes the tensor also makes that operand of it."""
    cast: Cast | None = getattr(linear.gemms, name)
    if linear.transform(name.partition("_")[0]) is not None:
        return False
    return cast is None or (PLAIN.why_not_cast(cast) is None and settings_of(cast) == settings)


def fused_format(linear: Linear, name: str, settings: BlockCast) -> str | None:
    """Return the format to which the kernel that makes the tensor casts that operand, or None for bf16.

    The bf16 tensor is either the operand itself or the source from which `cast_operand` makes it.
    """
    cast: Cast | None = getattr(linear.gemms, name)
    return cast.format if cast is not None and is_fused(linear, name, settings) else None


def cast_operand(
    x: Tensor, linear: Linear, name: str, axis: int, *, absmax: Tensor | None = None, **parts: Any
) -> Operand:
    """Return one operand of x, its values in bf16, by a kernel of its own.

    `absmax`: that of `shared_absmax`; without it a cast that needs one finds its own. `parts`: what `cast_one` does to
    x before it casts. A gathered weight is quantised already, its gain included, and is decoded.
    """
    if isinstance(x, GatheredWeight):
        return Operand(x.decoded(axis, torch.bfloat16))
    cast: Cast | None = getattr(linear.gemms, name)
    gemm = name.partition("_")[0]
    transform = linear.transform(gemm)
    if transform is None and (cast is None or PLAIN.why_not_cast(cast) is None):
        fmt, settings = (None, BlockCast()) if cast is None else (cast.format, settings_of(cast))
        return Operand(cast_one(x, fmt, axis, settings, **parts))
    signs = None if transform is None else signs_of(transform, f"{gemm}_transform", linear.random, x.device)
    how = any_cast(cast, transform, axis, parts.pop("round_first", False))
    draws = linear.draws(name)
    if cast is not None and cast.scale == "FP32":
        values, scales = cast_blocks(x, how, signs=signs, draws=draws, **parts)
        return Operand(values, None, scales, how.block_size)
    if absmax is None and how.has_outer:
        absmax = absmax_any(x, how, signs=signs, **parts)
    values = cast_any(x, how, signs=signs, draws=draws, outer=absmax, **parts)
    return Operand(values, None if cast is None else result_scale(absmax, cast, x.device))


def result_scale(absmax: Tensor | None, cast: Cast, device: torch.device) -> Tensor | None:
    """Return the operand's factor of its GEMM's result, or None; `absmax`: that of the tensor if the cast needs it."""
    return scale_of_result(None if absmax is None else scale_above(absmax, cast), cast, device)


def shared_absmax(x: Tensor, linear: Linear, name: str, **parts: Any) -> Tensor | None:
    """Return the absmax of x if both of its operands are cast below it, float32 []; None if they are not.

    `name`: that of the operand along the rows. `parts`: as in `cast_operand`, the same for both operands. A transform
    or a pre-rounding changes the absmax, so an operand that alone has one needs its own pass; and two transforms are
    along different axes.
    """
    names = name, ALONG_COLUMNS[name]
    row, column = (getattr(linear.gemms, operand) for operand in names)
    is_shared = (
        row is not None
        and column is not None
        and row.outer_scale == column.outer_scale == "tensor"
        and row.pre_round == column.pre_round
        and not any(linear.transform(operand.partition("_")[0]) for operand in names)
    )
    if not is_shared:
        return None
    return absmax_any(x, any_cast(row, None, -1, parts.pop("round_first", False)), **parts)


def plain_operand(x: Tensor, cast: Cast, axis: int, after: Tensor | None) -> Tensor:
    """Return x cast plainly along `axis`, bf16; `after` as in `cast_one`."""
    return cast_one(x, cast.format, axis, settings_of(cast), after=after)


def any_cast(cast: Cast | None, transform: Hadamard | None, axis: int, round_first: bool) -> OperandCast:
    """Return the `OperandCast` that `cast_any` takes for that cast and transform."""
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


def finish_operand(
    x: Tensor, linear: Linear, name: str, axis: int, settings: BlockCast, absmax: Tensor | None = None
) -> Operand:
    """Return the operand from a kernel's result x: x itself if it is fused, else its own cast of x."""
    return Operand(x) if is_fused(linear, name, settings) else cast_operand(x, linear, name, axis, absmax=absmax)


def gradient_formats(linear: Linear, settings: BlockCast) -> tuple[str | None, str | None]:
    """Return the formats of dH for dgrad and wgrad in the kernel that makes dH. One bf16 tensor is enough for both."""
    row, column = (fused_format(linear, name, settings) for name in ("dgrad_dh", "wgrad_dh"))
    return row, UNREAD if row is None and column is None else column


def gradient_operands(made: tuple[Tensor, Tensor], linear: Linear, settings: BlockCast) -> tuple[Operand, Operand]:
    """Return dgrad's and wgrad's operands of dH from the two tensors of the kernel that made dH."""
    row, column = made
    if not any(is_fused(linear, name, settings) for name in ("dgrad_dh", "wgrad_dh")):
        return both_operands(row, linear)
    column = column if column.numel() else row
    dgrad = finish_operand(row, linear, "dgrad_dh", -1, settings)
    return dgrad, finish_operand(column, linear, "wgrad_dh", -2, settings)


def gradient_operands_of(dh: Tensor, linear: Linear, settings: BlockCast) -> tuple[Operand, Operand]:
    """Return dgrad's and wgrad's operands of an existing bf16 dH."""
    row, column = (fused_format(linear, name, settings) for name in ("dgrad_dh", "wgrad_dh"))
    if row is not None and column is not None:
        for_dgrad, for_wgrad = cast_both(dh, row, column, settings)
        return Operand(for_dgrad), Operand(for_wgrad)
    return both_operands(dh, linear)


def both_operands(dh: Tensor, linear: Linear) -> tuple[Operand, Operand]:
    """Return dgrad's and wgrad's operands of a bf16 dH, in one kernel if both are below its absmax and it has both."""
    row, column = linear.gemms.dgrad_dh, linear.gemms.wgrad_dh
    absmax = shared_absmax(dh, linear, "dgrad_dh")
    casts = any_cast(row, None, -1, False), any_cast(column, None, -2, False)
    if absmax is None or row is None or column is None or not all(map(has_both, casts)):
        dgrad = cast_operand(dh, linear, "dgrad_dh", -1, absmax=absmax)
        return dgrad, cast_operand(dh, linear, "wgrad_dh", -2, absmax=absmax)
    values = cast_any_both(dh, *casts, absmax)
    scales = (result_scale(absmax, cast, dh.device) for cast in (row, column))
    dgrad, wgrad = map(Operand, values, scales)
    return dgrad, wgrad
