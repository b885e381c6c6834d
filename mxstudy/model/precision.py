"""The precision plan: which linear runs in which row of PRECISIONS, from patterns of module names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from mxstudy import config
from mxstudy.config.model import BLOCKS
from mxstudy.model.decoder import Block
from mxstudy.model.joined import joined
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.norm import PostRoundMXNorm
from mxstudy.numerics.cast import BlockCast, check_nvfp4
from mxstudy.numerics.formats import CODE_BUMP, FORMATS, look_up
from mxstudy.numerics.matmul import PRECISIONS, Gemms
from mxstudy.numerics.native import why_not_native
from mxstudy.reader import ConfigError, require, suggest

HEAD = "output"  # the module's name in the decoder
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def block_cast(precision: config.Precision) -> BlockCast:
    return BlockCast(
        precision.block_size,
        precision.scale_rule,
        precision.rounding,
        precision.operand_pre_round,
        precision.pad_blocks,
    )


def apply_precision(
    model: nn.Module, precision: config.Precision, step: int, compute: str, device: torch.device
) -> dict[str, str]:
    """Set every linear's formats to those of the schedule's row at `step`; returns {module name: row of PRECISIONS}.

    `device`: where the model is going to run. Raises ConfigError for a pattern that matches nothing, an unknown row,
    sizes that the block does not divide, a backend that is not there.
    """
    plan = [row for row in precision.schedule if row.from_step <= step][-1].plan
    if precision.head:
        plan = plan | {HEAD: plan[BLOCKS]}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, MXLinear)}
    rows = match_plan(plan, list(linears), default=compute)
    rows |= dict.fromkeys(end_blocks(list(linears), precision.skip_blocks), compute)
    for name, linear in linears.items():
        gemms = look_up(PRECISIONS, rows[name], f"precision.schedule: plan for {name}")
        linear.cast = block_cast(precision)
        native = is_native(precision.backend, linear, gemms, DTYPES[compute], device)
        linear.gemms = replace(gemms, native=native)
        check_precision(name, linear, rows[name], compute)
    for block in model.modules():
        if isinstance(block, Block):
            block.joined = joined(block, DTYPES[compute])
    return rows


def check_starts(precision: config.Precision, steps: int) -> None:
    """ConfigError where a row of the schedule would never be reached."""
    for row in precision.schedule:
        if row.from_step >= steps:
            raise ConfigError(
                f"precision.schedule: a row starts at step {row.from_step}, after the last of {steps}; "
                f"give at most {steps - 1}"
            )


def is_native(backend: str, linear: MXLinear, gemms: Gemms, compute: torch.dtype, device: torch.device) -> bool:
    """Whether the linear's GEMMs, in those formats, run on the hardware's MX units.

    Raises ConfigError where native was asked for in vain.
    """
    if backend == "emulated" or gemms == Gemms():
        return False
    reason = why_not_native(gemms, linear.cast, compute, device)
    if linear.weight.ndim > 2:
        reason = "it multiplies matrices, and these are stacks of them"
    if reason and backend == "native":
        raise ConfigError(f"precision.backend: native cannot be had: {reason}; emulated runs everywhere")
    return reason is None


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


def end_blocks(names: list[str], skip_blocks: int) -> list[str]:
    """The linears of so many first and last blocks; ConfigError where that leaves none between."""
    if not skip_blocks:
        return []
    blocks = {name: int(name.split(".")[1]) for name in names if name.startswith("layers.")}
    between = range(skip_blocks, max(blocks.values()) + 1 - skip_blocks)
    if not between:
        raise ConfigError(
            f"precision.skip_blocks: {skip_blocks} at both ends leave none of {len(set(blocks.values()))}"
        )
    return [name for name, block in blocks.items() if block not in between]


def check_precision(name: str, linear: MXLinear, row: str, compute: str) -> None:
    if row in DTYPES and row != compute:
        raise ConfigError(f"precision.schedule: {name} asks for {row}, but train.compute is {compute}; make them equal")
    formats = {fmt for pair in linear.gemms.operands for fmt in pair if fmt}
    if "NVFP4" in formats:
        try:
            check_nvfp4(linear.cast)
        except ConfigError as error:
            raise ConfigError(f"precision.{error}") from None
    other = next(iter(sorted(formats - {"E4M3"})), None)
    if linear.cast.scale_rule == CODE_BUMP and other:
        raise ConfigError(f"precision.scale_rule: {CODE_BUMP} is for E4M3 alone, and {name} has {other}; take rceil")
    if isinstance(linear, NormLinear) and isinstance(linear.norm, PostRoundMXNorm):
        check_scales_read(name, linear.norm.fmt, linear.gemms)
    block_size = linear.cast.block_size
    sizes = {"input": linear.in_features, "output": linear.out_features}
    for side, size in sizes.items():
        if formats and linear.gemms.scaling == "block" and size % block_size and not linear.cast.pad_blocks:
            raise ConfigError(
                f"precision.block_size: {block_size} does not divide {name}'s {side} size {size}; choose sizes that it "
                "divides, or fill blocks up with zeros: precision.pad_blocks=true"
            )


def has_token_blocks(module: nn.Module) -> bool:
    """Whether its wgrad has operands in whole blocks, which lie along the token axis."""
    if not isinstance(module, MXLinear) or module.gemms.scaling != "block" or module.cast.pad_blocks:
        return False
    return bool(module.gemms.wgrad_dh or module.gemms.wgrad_x)


def check_scales_read(name: str, reads: str, gemms: Gemms) -> None:
    """The scales that the norm takes its RMS from are those that its output is cast with."""
    operand = gemms.forward_x
    if operand is None:
        return
    require(
        gemms.scaling == "block",
        f"norm: PostRoundMXNorm reads block scales, and {name} casts the norm's output under one scale a tensor; "
        "take rmsnorm, or a row with a scale a block",
    )
    if operand == reads:
        return
    if FORMATS[operand].scale != "E8M0":
        raise ConfigError(f"norm: PostRoundMXNorm reads E8M0 scales, and {name} casts the norm's output to {operand}")
    raise ConfigError(f"norm.format: {reads}, but {name} casts the norm's output to {operand}; make them equal")


def describe(model: nn.Module, rows: Mapping[str, str]) -> str:
    """The plan as applied, a line a row: how many linears, both operands' formats in each GEMM, the backend."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, MXLinear)}
    groups = Counter((row, linears[name].gemms) for name, row in rows.items())
    return "\n".join(f"{count} linears in {row}: {describe_gemms(gemms)}" for (row, gemms), count in groups.items())


def describe_gemms(gemms: Gemms) -> str:
    pairs = zip(("forward", "dgrad", "wgrad"), gemms.operands, strict=True)
    formats = ", ".join(f"{name} {a or '-'} x {b or '-'}" for name, (a, b) in pairs)
    scaling = ", one FP32 scale a tensor" if gemms.scaling == "tensor" else ""
    return formats + scaling + (", native" if gemms.native else "")
