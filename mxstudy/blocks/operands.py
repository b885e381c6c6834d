"""The operands of a fused block, each made as its plan says (`mxstudy.blocks.plans`).

Where both operands of a tensor are below the scale of the tensor, its absmax is found in one pass for the two
(`shared_absmax`), and `cast_any_both` makes both of a gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mxstudy.blocks.plans import LinearPlan, OperandPlan, settings_of
from mxstudy.config.casts import BlockCast, Cast, gemm_of
from mxstudy.kernels import absmax_any, cast_any, cast_any_both, cast_blocks, cast_both, cast_one
from mxstudy.numerics.cast import outer_scale, scale_of_result
from mxstudy.numerics.gathered_weight import GatheredWeight
from mxstudy.numerics.gemms import Operand
from mxstudy.numerics.random_bits import Random, draws_of_operand, signs_of


class PlannedLinear(NamedTuple):
    """A linear of a block: how its operands are made, and their random numbers, if any."""

    plan: LinearPlan
    random: Random | None = None


def planned(plan: LinearPlan, keys: Tensor | None, places: Tensor | None) -> PlannedLinear:
    """Return a linear with the random numbers of its keys and places, without any if it draws none."""
    return PlannedLinear(plan, None if keys is None or places is None else Random(keys, places))


def cast_operand(x: Tensor, linear: PlannedLinear, name: str, *, absmax: Tensor | None = None, **parts: Any) -> Operand:
    """Return one operand of x, its values in bf16, by a kernel of its own.

    `absmax`: that of `shared_absmax`; without it a cast that needs one finds its own. `parts`: what `cast_one` does to
    x before it casts. A gathered weight is quantised already, its gain included, and is decoded.
    """
    plan: OperandPlan = getattr(linear.plan, name)
    cast, how = plan.cast, plan.own
    if isinstance(x, GatheredWeight):
        return Operand(x.decoded(plan.axis, torch.bfloat16))
    if plan.plain is not None:
        fmt = None if cast is None else cast.format
        return Operand(cast_one(x, fmt, plan.axis, plan.plain, round_first=plan.round_first, **parts))
    assert how is not None
    signs = None
    if plan.transform is not None:
        signs = signs_of(plan.transform, f"{gemm_of(name)}_transform", linear.random, x.device)
    draws = draws_of_operand(linear.random, name) if how.draws else None
    if how.scale == "FP32":
        values, scales = cast_blocks(x, how, signs=signs, draws=draws, **parts)
        return Operand(values, None, scales, how.block_size)
    if absmax is None and how.has_outer:
        absmax = absmax_any(x, how, signs=signs, **parts)
    values = cast_any(x, how, signs=signs, draws=draws, outer=absmax, **parts)
    return Operand(values, result_scale(absmax, plan, x.device))


def result_scale(absmax: Tensor | None, plan: OperandPlan, device: torch.device) -> Tensor | None:
    """Return the operand's factor of its GEMM's result, or None; `absmax`: that of the tensor if the cast needs it."""
    if plan.cast is None:
        return None
    return scale_of_result(None if absmax is None else outer_scale(absmax, plan.cast), plan.cast, device)


def shared_absmax(x: Tensor, linear: PlannedLinear, name: str, **parts: Any) -> Tensor | None:
    """Return the absmax of x if both of its operands are cast below it, float32 [], or None if they are not.

    `name`: that of the operand along the rows. `parts`: as in `cast_operand`, the same for both operands.
    """
    plan: OperandPlan = getattr(linear.plan, name)
    return absmax_any(x, plan.own, **parts) if plan.shares_absmax and plan.own is not None else None


def plain_operand(x: Tensor, cast: Cast, axis: int, after: Tensor | None) -> Tensor:
    """Return x cast plainly along `axis`, -1 or -2, bf16; `after` as in `cast_one`. `cast.pad`: fill the last block."""
    settings, size = replace(settings_of(cast), pad_blocks=False), x.shape[axis]
    if left := -size % settings.block_size if cast.pad else 0:
        x = F.pad(x, (0, left) if axis == -1 else (0, 0, 0, left))
    return cast_one(x, cast.format, axis, settings, after=after).narrow(axis, 0, size)


def finish_operand(x: Tensor, linear: PlannedLinear, name: str, absmax: Tensor | None = None) -> Operand:
    """Return the operand from a kernel's result x: x itself if it is fused, else its own cast of x."""
    plan: OperandPlan = getattr(linear.plan, name)
    return Operand(x) if plan.is_fused else cast_operand(x, linear, name, absmax=absmax)


def finish_gradient(made: tuple[Tensor, Tensor], linear: PlannedLinear) -> tuple[Operand, Operand]:
    """Return dgrad's and wgrad's operands of dH from the two tensors of the kernel that made dH."""
    row, column = made
    if not (linear.plan.dgrad_dh.is_fused or linear.plan.wgrad_dh.is_fused):
        return cast_gradient_apart(row, linear)
    column = column if column.numel() else row
    return finish_operand(row, linear, "dgrad_dh"), finish_operand(column, linear, "wgrad_dh")


def cast_gradient(dh: Tensor, linear: PlannedLinear, settings: BlockCast) -> tuple[Operand, Operand]:
    """Return dgrad's and wgrad's operands of a dH that exists, bf16."""
    row, column = linear.plan.dgrad_dh.fused_format, linear.plan.wgrad_dh.fused_format
    if row is not None and column is not None:
        for_dgrad, for_wgrad = cast_both(dh, row, column, settings)
        return Operand(for_dgrad), Operand(for_wgrad)
    return cast_gradient_apart(dh, linear)


def cast_gradient_apart(dh: Tensor, linear: PlannedLinear) -> tuple[Operand, Operand]:
    """Return dgrad's and wgrad's operands of a bf16 dH by a kernel each, or by one if the plan `casts_dh_at_once`."""
    absmax, row, column = shared_absmax(dh, linear, "dgrad_dh"), linear.plan.dgrad_dh, linear.plan.wgrad_dh
    if not linear.plan.casts_dh_at_once:
        dgrad = cast_operand(dh, linear, "dgrad_dh", absmax=absmax)
        return dgrad, cast_operand(dh, linear, "wgrad_dh", absmax=absmax)
    assert absmax is not None
    assert row.own is not None
    assert column.own is not None
    of_row, of_column = cast_any_both(dh, row.own, column.own, absmax)
    dgrad = Operand(of_row, result_scale(absmax, row, dh.device))
    return dgrad, Operand(of_column, result_scale(absmax, column, dh.device))
