"""The precision plan: which linear runs in which row of PRECISIONS, from patterns of module names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from mxstudy import config
from mxstudy.model.linear import MXLinear
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.formats import look_up
from mxstudy.numerics.matmul import PRECISIONS, Gemms
from mxstudy.reader import ConfigError, suggest

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def apply_precision(model: nn.Module, precision: config.Precision, step: int, compute: str) -> dict[str, str]:
    """Set every linear's formats to those of the schedule's row at `step`; returns {module name: row of PRECISIONS}.

    Raises ConfigError for a pattern that matches nothing, an unknown row, sizes that the block does not divide.
    """
    plan = [row for row in precision.schedule if row.from_step <= step][-1].plan
    linears = {name: module for name, module in model.named_modules() if isinstance(module, MXLinear)}
    rows = match_plan(plan, list(linears), default=compute)
    cast = BlockCast(precision.block_size, precision.scale_rule, precision.rounding)
    for name, linear in linears.items():
        linear.gemms, linear.cast = look_up(PRECISIONS, rows[name], f"precision.schedule: plan for {name}"), cast
        check_precision(name, linear, rows[name], compute)
    return rows


def match_plan(plan: Mapping[str, str], names: list[str], default: str) -> dict[str, str]:
    """{name: row}; of several patterns that match, the last wins."""
    rows = dict.fromkeys(names, default)
    for pattern, row in plan.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            patterns = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in names if "." in name)
            near = suggest(pattern, [*patterns, *names])
            raise ConfigError(f"precision.schedule: pattern {pattern!r} matches no linear; {near}")
        rows |= dict.fromkeys(matched, row)
    return rows


def check_precision(name: str, linear: MXLinear, row: str, compute: str) -> None:
    if row in DTYPES and row != compute:
        raise ConfigError(f"precision.schedule: {name} asks for {row}, but train.compute is {compute}; make them equal")
    block_size = linear.cast.block_size
    sizes = {"input": linear.in_features, "output": linear.out_features}
    for side, size in sizes.items():
        if linear.gemms != Gemms() and size % block_size:
            raise ConfigError(f"precision.block_size: {block_size} does not divide {name}'s {side} size {size}")


def describe(rows: Mapping[str, str]) -> str:
    """The plan as applied, a line a row: how many linears, and the formats of both operands of each GEMM."""
    lines = []
    for row in dict.fromkeys(rows.values()):
        formats = [fmt or "-" for fmt in vars(PRECISIONS[row]).values()]
        gemms = zip(("forward", "dgrad", "wgrad"), formats[::2], formats[1::2], strict=True)
        count = sum(r == row for r in rows.values())
        lines.append(f"{count} linears in {row}: " + ", ".join(f"{name} {a} x {b}" for name, a, b in gemms))
    return "\n".join(lines)
