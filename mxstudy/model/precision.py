"""The precision plan: which linear runs by which recipe, from patterns of module names."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from mxstudy import config
from mxstudy.config.casts import OPERANDS, SETTINGS, TRANSFORMS, BlockCast, Cast, Gemms, Hadamard
from mxstudy.config.model import BLOCKS
from mxstudy.config.settings import vain_settings, written
from mxstudy.model.backends import Place, describe_roads, joined_block, plan_roads, take_roads
from mxstudy.model.decoder import Block
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.norm import Norm, PostRoundMXNorm
from mxstudy.model.randomness import give_streams
from mxstudy.numerics.cast import check_format
from mxstudy.numerics.formats import FORMATS, ROUNDINGS, is_random, look_up
from mxstudy.numerics.norm import check_source
from mxstudy.reader import ConfigError, require, suggest

HEAD = "output"  # the module's name in the decoder
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def apply_precision(
    model: nn.Module,
    precision: config.Precision,
    step: int,
    compute: str,
    device: torch.device,
    seeds: Sequence[int] = (0,),
    compiled: bool = False,
    evaluates: bool = False,
) -> dict[str, str]:
    """Set every linear's casts, and every block's backend, to those of the schedule's row at `step`.

    Returns {module name: recipe}. `device`: where the model is going to run, `compiled` or not. `seeds`: what random
    roundings and signs are drawn by; one a replica of a stack. `evaluates`: it is not trained there, but asked, see
    `for_evaluation`. Raises ConfigError for a pattern that matches nothing, an unknown recipe, sizes that its blocks do
    not divide, a setting that no operand takes, a backend that cannot be had.
    """
    plan = [row for row in precision.schedule if row.from_step <= step][-1].plan
    if precision.head:
        plan = plan | {HEAD: plan[BLOCKS]}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, MXLinear)}
    rows = match_plan(plan, list(linears), default=compute)
    rows |= dict.fromkeys(end_blocks(list(linears), precision.skip_blocks), compute)
    for name, linear in linears.items():
        linear.cast = precision.settings
        try:
            gemms = precision.recipe(rows[name]).filled(linear.cast)
        except ConfigError as error:
            raise ConfigError(f"precision.schedule: plan for {name}: {error}") from None
        linear.gemms = for_evaluation(gemms) if evaluates else gemms
        check_precision(name, linear, Origin(precision, rows[name]), compute)
    check_settings(precision, norm_settings(model))
    give_streams(model, linears, seeds)
    place = Place(DTYPES[compute], device, compiled)
    take_roads(model, plan_roads(model, precision.backend, place), place)
    return rows


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Have a model that is trained compute as it is asked, see `for_evaluation`; afterwards as it did, to the object.

    Nothing else is touched: a recipe that is the same then keeps its compiled code, and every block its backend.
    """
    linears = {m: for_evaluation(m.gemms) for m in model.modules() if isinstance(m, MXLinear)}
    before = {linear: linear.gemms for linear, asked in linears.items() if asked is not linear.gemms}
    blocks = [m for m in model.modules() if isinstance(m, Block) and before.keys() & set(m.linears())]
    joined = {block: block.joined for block in blocks if block.joined is not None}
    try:
        for linear in before:
            linear.gemms = linears[linear]
        for block in joined:
            block.joined = joined_block(block)
        yield
    finally:
        for linear, gemms in before.items():
            linear.gemms = gemms
        for block, settings in joined.items():
            block.joined = settings


def for_evaluation(gemms: Gemms) -> Gemms:
    """Return the recipe, filled, under which a trained model is asked: what it answers depends on the question alone.

    X has one scale a row where in training it has one a tensor, which is that of everything in the batch; square blocks
    lie in several rows, and keep it. The forward's operands are rounded to nearest even where in training they are
    rounded by chance, which is drawn by the place in the batch, and its signs are those of the run, not of a step. All
    else stays. Returns the same object where nothing of this is in it.
    """
    operands = {name: cast for name, cast in gemms.casts() if name.startswith("forward")}
    asked = {name: replace(cast, rounding="even", random_bits=24) for name, cast in operands.items() if is_random(cast)}
    x, transform = asked.get("forward_x", gemms.forward_x), gemms.forward_transform
    if x is not None and x.outer_scale == "tensor" and not x.two_dimensional:
        asked["forward_x"] = replace(x, outer_scale="row")
    gemms = replace(gemms, **asked) if asked else gemms  # type: ignore[arg-type]
    if transform is not None and transform.signs in ("step", "call"):
        gemms = replace(gemms, forward_transform=replace(transform, signs="seed"))
    return gemms


def check_starts(precision: config.Precision, steps: int) -> None:
    """ConfigError where a row of the schedule would never be reached."""
    for row in precision.schedule:
        if row.from_step >= steps:
            raise ConfigError(
                f"precision.schedule: a row starts at step {row.from_step}, after the last of {steps}; "
                f"give at most {steps - 1}"
            )


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


class Origin(NamedTuple):
    """Say where a linear's recipe comes from: the config, and the recipe's name in its plan."""

    precision: config.Precision
    row: str

    def key(self, part: str, field: str) -> str:
        """Return what to change for that field of an operand or a transform: a key, or the recipe by its name."""
        own = getattr(self.precision.recipe(self.row), part)
        field = {setting: name for name, setting in SETTINGS.items()}.get(field, field)
        if isinstance(own, Cast) and field in SETTINGS and own.is_open(field):
            return f"precision.{SETTINGS[field]}"
        if self.row in self.precision.recipes:
            return f"precision.recipes.{self.row}.{part}.{field}"
        return f"precision.schedule: recipe {self.row}, {part}.{field}"


def norm_settings(model: nn.Module) -> set[str]:
    """Return the settings that the model's norms take, beside the casts."""
    return {name for module in model.modules() if isinstance(module, Norm) for name in module.reads}


def check_settings(precision: config.Precision, norm_reads: Collection[str]) -> None:
    """Raise ConfigError for a setting that no operand takes, though some are quantised, and no norm."""
    for vain in vain_settings(precision, norm_reads):
        require(not vain.refused, vain.message)


def check_precision(name: str, linear: MXLinear, origin: Origin, compute: str) -> None:
    """Raise ConfigError where a linear cannot compute by its recipe."""
    row = origin.row
    if row in DTYPES and row != compute:
        raise ConfigError(f"precision.schedule: {name} asks for {row}, but train.compute is {compute}; make them equal")
    for operand, cast in linear.gemms.casts():
        try:
            check_format(cast, look_up(FORMATS, cast.format, "format"))
            look_up(ROUNDINGS, str(cast.rounding), "rounding")
        except ConfigError as error:
            field, _, rest = str(error).partition(": ")
            raise ConfigError(f"{origin.key(operand, field)}: {name}, {operand}: {rest}") from None
    for gemm in ("forward", "dgrad", "wgrad"):
        scaled = [(o, c) for o, c in linear.gemms.casts() if o.startswith(gemm) and c.scale == "FP32"]
        sizes = sorted({str(cast.block_size) for _, cast in scaled})
        if len(sizes) > 1:
            raise ConfigError(
                f"{origin.key(scaled[-1][0], 'block_size')}: {name}: FP32 scales of both operands of a GEMM are in "
                f"blocks alike, not of {sizes}"
            )
    if isinstance(linear, NormLinear):
        try:
            check_source(linear.gemms, linear.norm.fold_gain)
        except ConfigError as error:
            raise ConfigError(f"precision.schedule: plan for {name}: {error}") from None
        if isinstance(linear.norm, PostRoundMXNorm):
            check_scales_read(name, linear.norm, linear.gemms.forward_x)
    sides = {"in": ("input", linear.in_features), "out": ("output", linear.out_features)}
    for divisor in divisors(linear.gemms):
        side, size = sides.get(divisor.axis, ("", 0))
        if size % divisor.size:
            remedy = f"choose sizes that it divides{divisor.remedy}"
            raise ConfigError(
                f"{origin.key(*divisor.place)}: {divisor.size} does not divide {name}'s {side} size {size}; {remedy}"
            )


# The axes of each operand: that of its GEMM's contraction, and the other.
AXES = {
    "forward_x": ("in", "tokens"),
    "forward_w": ("in", "out"),
    "dgrad_dh": ("out", "tokens"),
    "dgrad_w": ("out", "in"),
    "wgrad_dh": ("tokens", "out"),
    "wgrad_x": ("tokens", "in"),
}


class Divisor(NamedTuple):
    """What has to divide an axis (in, out, tokens): the size of which field of which operand or transform."""

    place: tuple[str, str]
    axis: str
    size: int

    @property
    def remedy(self) -> str:
        return ", or fill blocks up with zeros: precision.pad_blocks=true" if self.place[0] in OPERANDS else ""

    def __str__(self) -> str:
        return f"blocks of {self.size}" if self.place[0] in OPERANDS else f"a Hadamard transform of {self.size}"


def divisors(gemms: Gemms) -> list[Divisor]:
    """Return all that has to divide an axis of a linear."""
    found = []
    for operand, cast in gemms.casts():
        if cast.scale != "none" and not cast.pad:
            axes = AXES[operand] if cast.two_dimensional else AXES[operand][:1]
            found += [Divisor((operand, "block_size"), axis, cast.block_size or 1) for axis in axes]
    for axis, name in zip(("in", "out", "tokens"), TRANSFORMS, strict=True):
        transform: Hadamard | None = getattr(gemms, name)
        if transform is not None:
            found.append(Divisor((name, "size"), axis, transform.size))
    return found


def token_divisors(model: nn.Module) -> list[Divisor]:
    """Return what lies along the tokens of a micro-batch: blocks, and transforms."""
    linears = (module for module in model.modules() if isinstance(module, MXLinear))
    return [divisor for linear in linears for divisor in divisors(linear.gemms) if divisor.axis == "tokens"]


def token_block(model: nn.Module) -> int:
    """Return what has to divide the tokens of a micro-batch: 1 where no block and no transform lies along them."""
    return math.lcm(*(divisor.size for divisor in token_divisors(model)))


def check_tokens(model: nn.Module, tokens: str, number: int) -> None:
    """Raise ConfigError where so many tokens do not divide; `tokens` begins the message: 'train.batch_size: 48 ...'."""
    for divisor in token_divisors(model):
        where = f" ({divisor.place[0]})" if divisor.place[0] in TRANSFORMS else ""
        require(number % divisor.size == 0, f"{tokens} do not divide into {divisor}{where}")


def check_scales_read(name: str, norm: PostRoundMXNorm, cast: Cast | None) -> None:
    """Raise ConfigError unless the scales that the norm takes its RMS from are those that its output is cast with."""
    if cast is None:
        return
    require(
        cast.scale != "none",
        f"norm: PostRoundMXNorm reads block scales, and {name} casts the norm's output under one scale a tensor; "
        "take rmsnorm, or a row with a scale a block",
    )
    if cast.scale != "E8M0":
        raise ConfigError(
            f"norm: PostRoundMXNorm reads E8M0 scales, and {name} casts the norm's output to {cast.format}"
        )
    reads = norm.fmt
    require(
        cast.format == reads,
        f"norm.format: {reads}, but {name} casts the norm's output to {cast.format}; make them equal",
    )
    own, theirs = ((c.block_size, c.scale_rule) for c in (norm.block_cast, cast))
    is_simple = not cast.two_dimensional and cast.statistic == "absmax" and len(cast.candidates) == 1
    require(
        own == theirs and is_simple,
        f"norm: PostRoundMXNorm reads the scales of 1 x {own[0]} blocks by {own[1]}, and {name} casts its output to "
        "others; take mxnorm_p2",
    )


def describe(model: nn.Module, rows: Mapping[str, str], forward_only: bool = False) -> str:
    """Return the plan as applied, a line for each recipe and each backend: how many linears, what each GEMM has.

    `forward_only`: of a model that is asked, and not trained, which has no other GEMM.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, MXLinear)}
    applied = {name: forward_of(linears[name].gemms) if forward_only else linears[name].gemms for name in rows}
    groups = Counter((row, applied[name]) for name, row in rows.items())
    plan = [
        f"{count} linears in {row}: {describe_gemms(gemms, forward_only)}" for (row, gemms), count in groups.items()
    ]
    notes = [
        f"{row}: a scale or random signs span a micro-batch: numbers depend on its size and on the number of ranks"
        for row in {row: None for row, gemms in groups if spans_micro_batch(gemms)}
    ]
    settings = next((linear.cast for linear in linears.values()), BlockCast())
    notes += describe_settings(settings, groups, norm_settings(model))
    return "\n".join([*plan, *notes, *describe_roads(model)])


def forward_of(gemms: Gemms) -> Gemms:
    """Return the recipe without its backward."""
    return Gemms(forward_x=gemms.forward_x, forward_w=gemms.forward_w, forward_transform=gemms.forward_transform)


def describe_settings(
    settings: BlockCast, recipes: Iterable[tuple[str, Gemms]], norm_reads: Collection[str]
) -> list[str]:
    """Return lines about the settings that are off their defaults: which operands keep their own, and what none takes.

    Where arms share their settings, one that quantises nothing has some that it does not take.
    """
    casts = {(row, operand): cast for row, gemms in recipes for operand, cast in gemms.casts()}
    lines, vain = [], []
    for field, setting in SETTINGS.items():
        value = getattr(settings, setting)
        if value == getattr(BlockCast, setting):
            continue
        said = f"precision.{setting}={written(value)}"
        having = {place: getattr(cast, field) for place, cast in casts.items() if cast.has(field)}
        if not having and setting not in norm_reads:
            vain.append(said)
        keeping: dict[str, list[str]] = defaultdict(list)
        for (row, operand), own in having.items():
            if own != value:
                keeping[row].append(f"{operand} keeps {written(own)}")
        lines += [f"{row}: {said} fills what is left open; {', '.join(own)}" for row, own in keeping.items()]
    if vain:
        lines.append(f"{', '.join(vain)}: no operand here takes {'it' if len(vain) == 1 else 'them'}")
    return lines


def spans_micro_batch(gemms: Gemms) -> bool:
    """Return whether something belongs to all tokens at hand: a scale of activations or gradients, or signs."""
    spans = any(cast.outer_scale == "tensor" and "tokens" in AXES[name] for name, cast in gemms.casts())
    transforms = (getattr(gemms, name) for name in TRANSFORMS)
    return spans or any(transform.signs == "call" for transform in transforms if transform is not None)


def describe_gemms(gemms: Gemms, forward_only: bool = False) -> str:
    pairs = (("forward", gemms.forward), ("dgrad", gemms.dgrad), ("wgrad", gemms.wgrad))
    parts = []
    for name, gemm in pairs[:1] if forward_only else pairs:
        rotated = f", {describe_transform(gemm.transform)}" if gemm.transform else ""
        parts.append(f"{name} {describe_cast(gemm.left)} x {describe_cast(gemm.right)}{rotated}")
    return ", ".join(parts)


def describe_cast(cast: Cast | None) -> str:
    """Return the format and what is not usual about the cast: 'E2M1 (16x16, stochastic)'."""
    if cast is None:
        return "-"
    has_own_scales, outer = cast.scale == FORMATS[cast.format].scale, cast.outer_scale
    said = {
        "two_dimensional": f"{cast.block_size}x{cast.block_size}",
        "scale": "" if has_own_scales or cast.scale == "none" else f"{cast.scale} scales",
        "outer_scale": {"bound": "one scale by the norm's bound"}.get(outer, f"one scale a {outer}"),
        "rounding": cast.rounding,
        "source": "of the forward's",
        "mask_clipped": "gradients masked",
        "headroom": f"headroom {cast.headroom:.4g}",
        "candidates": f"candidates {', '.join(f'{factor:g}' for factor in cast.candidates)}",
        "block_size": "" if cast.two_dimensional or cast.scale == "none" else f"blocks of {cast.block_size}",
        "statistic": f"range by {cast.statistic}",
    }
    notes = [said.get(name, f"{name} {getattr(cast, name)}") for name in unusual(cast)]
    return f"{cast.format} ({', '.join(filter(None, notes))})" if any(notes) else cast.format


def unusual(cast: Cast) -> list[str]:
    """Return the fields of a cast that differ from its format's plain cast under the default settings."""
    usual = Cast(format=cast.format, block_size=FORMATS[cast.format].block_size).filled(BlockCast())
    values = {field.name: getattr(cast, field.name) for field in fields(cast)}
    return [name for name, value in values.items() if value is not None and value != getattr(usual, name, None)]


def describe_transform(transform: Hadamard) -> str:
    """Return size and signs: 'Hadamard 16 (signs by seed)'."""
    signs = "written signs" if transform.vector else f"signs by {transform.signs}" if transform.signs != "none" else ""
    notes = ", ".join(filter(None, (signs, "after it" if transform.signs_after else "")))
    return f"Hadamard {transform.size} ({notes})" if notes else f"Hadamard {transform.size}"
