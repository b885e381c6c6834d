"""The precision plan: give every linear the recipe that its plan names, and check it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from mxstudy import config
from mxstudy.blocks.plans import ANY
from mxstudy.config.casts import OPERANDS, SETTINGS, TRANSFORMS, Cast, Gemms, Hadamard
from mxstudy.config.settings import unused_settings
from mxstudy.model.backends import apply_backends, plan_backends
from mxstudy.model.decoder import Block
from mxstudy.model.dropout import without_dropout
from mxstudy.model.fusable import Target, linears_in
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.modules import modules_of
from mxstudy.model.moe import ALIGN, MixtureOfExperts, SharedUp, mixtures_of
from mxstudy.model.norm_casts import settings_read, take_cast
from mxstudy.model.patterns import check_skipped, end_blocks, match_plan, plan_of
from mxstudy.model.random_streams import give_streams
from mxstudy.model.vector_settings import apply_vector_settings
from mxstudy.numerics.cast import check_format
from mxstudy.numerics.formats import FORMATS, ROUNDINGS, is_random, look_up
from mxstudy.reader import ConfigError, require

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
    sequence_length: int | None = None,
) -> dict[str, str]:
    """Set every linear's casts, and every block's backend, to those of the schedule's row at `step`.

    Returns {module name: recipe}. `device`, `compiled`: where the model will run, and whether it will be compiled.
    `seeds`: the seeds of random roundings and signs, one per replica of a stack. `evaluates`: set the model up for
    evaluation instead of training, see `for_evaluation`. `sequence_length`: of a training, whose micro-batches are
    whole sequences; if given, `without_idle_padding` applies. Raises ConfigError for a pattern that matches nothing, an
    unknown recipe, a size that blocks do not divide, a setting that no operand takes, or a backend that cannot run.
    """
    plan = plan_of(precision, [row for row in precision.schedule if row.from_step <= step][-1])
    linears = modules_of(model, MXLinear)
    rows = match_plan(plan, list(linears), default=compute)
    skipped = end_blocks(list(linears), precision.skip_blocks)
    rows |= dict.fromkeys(skipped, compute)
    filled = cache(precision.filled)
    for name, linear in linears.items():
        linear.cast = precision.settings
        try:
            gemms = filled(rows[name])
        except ConfigError as error:
            raise ConfigError(f"precision.schedule: plan for {name}: {error}") from None
        gemms = for_evaluation(gemms) if evaluates else gemms
        linear.gemms = without_idle_padding(gemms, linear, sequence_length) if sequence_length else gemms
        check_precision(name, linear, Origin(precision, rows[name]), compute)
    apply_vector_settings(model, precision, compute)
    check_settings(precision, norm_settings(model))
    check_skipped(precision, list(linears), skipped)
    for mixture in mixtures_of(model).values():
        mixture.align = alignment(mixture)
    give_streams(model, linears, seeds)
    target = Target(DTYPES[compute], device, compiled)
    apply_backends(model, plan_backends(model, precision.backend, target), target)
    return rows


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Run a training model without dropout, with its evaluation recipes (`for_evaluation`), inside the `with` block.

    Afterwards the very same recipe objects are restored. Nothing else changes: a linear whose recipe is the same in
    both keeps its compiled code. A block keeps its backend, except that a fused block runs module by module if no
    kernel computes its evaluation recipes.
    """
    recipes = {linear: for_evaluation(linear.gemms) for linear in linears_in(model)}
    before = {linear: linear.gemms for linear, recipe in recipes.items() if recipe is not linear.gemms}
    blocks = [m for m in modules_of(model, Block).values() if before.keys() & set(linears_in(m))]
    fused = {block: block.fused for block in blocks if block.fused is not None}
    try:
        for linear in before:
            linear.gemms = recipes[linear]
        for block in fused:
            block.set_fused(all(ANY.why_not(linear.gemms) is None for linear in linears_in(block)))
        with without_dropout(model):
            yield
    finally:
        for linear, gemms in before.items():
            linear.gemms = gemms
        for block, settings in fused.items():
            block.fused = settings


def for_evaluation(gemms: Gemms) -> Gemms:
    """Return the (filled) recipe for evaluation: a sequence's result depends on it alone, unless blocks are square.

    A scale per tensor of X, which spans the batch, becomes a scale per row; square blocks span several rows and keep
    it. Stochastic rounding of the forward's operands, drawn by the position in the batch, becomes rounding to nearest
    even. Random signs of the forward are drawn by the run's seed, not by step. Everything else stays. Returns the same
    object if nothing changes.
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


def without_idle_padding(gemms: Gemms, linear: MXLinear, tokens: int) -> Gemms:
    """Return the (filled) recipe without padding in the operands whose blocks are complete anyway.

    Their values are the same, and most kernels need complete blocks. `tokens`: a divisor of the number of tokens of
    every micro-batch. A forward operand with blocks along the tokens stays padded, because an evaluation during the
    training has any number of tokens. Returns the same object if nothing changes.
    """

    def is_complete(name: str, cast: Cast) -> bool:
        in_evaluations = name.startswith("forward")
        sizes = {"in": linear.in_features, "out": linear.out_features, "tokens": 1 if in_evaluations else tokens}
        return not any(sizes[axis] % (cast.block_size or 1) for axis in axes_of_blocks(name, cast))

    complete = {name: replace(cast, pad=False) for name, cast in gemms.casts() if cast.pad and is_complete(name, cast)}
    return replace(gemms, **complete) if complete else gemms  # type: ignore[arg-type]


def check_starts(precision: config.Precision, steps: int) -> None:
    """Raise ConfigError if a row of the schedule would never be reached."""
    for row in precision.schedule:
        if row.from_step >= steps:
            raise ConfigError(
                f"precision.schedule: a row starts at step {row.from_step}, after the last of {steps}; "
                f"give at most {steps - 1}"
            )


class Origin(NamedTuple):
    """Where a linear's recipe comes from: the config, and the recipe's name in its plan."""

    precision: config.Precision
    row: str

    def key(self, part: str, field: str) -> str:
        """Return the config key that sets that field of an operand or transform, or else the recipe and the field."""
        own = getattr(self.precision.recipe(self.row), part)
        field = {setting: name for name, setting in SETTINGS.items()}.get(field, field)
        if isinstance(own, Cast) and field in SETTINGS and own.is_open(field):
            return f"precision.{SETTINGS[field]}"
        if self.row in self.precision.recipes:
            return f"precision.recipes.{self.row}.{part}.{field}"
        return f"precision.schedule: recipe {self.row}, {part}.{field}"


def norm_settings(model: nn.Module) -> set[str]:
    """Return the settings of `precision` that the model's norms read."""
    return {name for linear in linears_in(model) for name in settings_read(linear)}


def check_settings(precision: config.Precision, norm_reads: Collection[str]) -> None:
    """Raise ConfigError for a setting that neither a norm nor any of the quantised operands takes."""
    for one in unused_settings(precision, norm_reads):
        require(not one.refused, one.message)


def check_precision(name: str, linear: MXLinear, origin: Origin, compute: str) -> None:
    """Raise ConfigError if the linear cannot compute with its recipe."""
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
                f"{origin.key(scaled[-1][0], 'block_size')}: {name}: both operands of a GEMM with FP32 scales need the "
                f"same block size, not {sizes}"
            )
    if isinstance(linear, NormLinear | SharedUp):
        take_cast(name, linear, origin.precision.settings)
    sides = {"in": ("input", linear.in_features), "out": ("output", linear.out_features)}
    for divisor in divisors(linear.gemms):
        side, size = sides.get(divisor.axis, ("", 0))
        if size % divisor.size:
            remedy = f"choose sizes that it divides{divisor.remedy}"
            raise ConfigError(
                f"{origin.key(*divisor.field)}: {divisor.size} does not divide {name}'s {side} size {size}; {remedy}"
            )


# The two axes of each operand: first the one that its GEMM contracts, then the other.
AXES = {
    "forward_x": ("in", "tokens"),
    "forward_w": ("in", "out"),
    "dgrad_dh": ("out", "tokens"),
    "dgrad_w": ("out", "in"),
    "wgrad_dh": ("tokens", "out"),
    "wgrad_x": ("tokens", "in"),
}


def axes_of_blocks(operand: str, cast: Cast) -> tuple[str, ...]:
    """Return the axes along which the operand's blocks lie: in, out or tokens."""
    return AXES[operand] if cast.two_dimensional else AXES[operand][:1]


class Divisor(NamedTuple):
    """A size that must divide an axis (in, out, tokens); `field`: the operand or transform, and its field.

    `may_pad`: blocks of that format may be filled up with zeros.
    """

    field: tuple[str, str]
    axis: str
    size: int
    may_pad: bool = False

    @property
    def remedy(self) -> str:
        return ", or fill blocks up with zeros: precision.pad_blocks=true" if self.may_pad else ""

    def __str__(self) -> str:
        return f"blocks of {self.size}" if self.field[0] in OPERANDS else f"a Hadamard transform of {self.size}"


def divisors(gemms: Gemms, with_padded: bool = False) -> list[Divisor]:
    """Return the sizes that must divide an axis of a linear with this recipe; `with_padded`: of padded casts too."""
    needed = []
    for operand, cast in gemms.casts():
        if cast.scale != "none" and (with_padded or not cast.pad):
            may_pad, size = cast.format != "NVFP4", cast.block_size or 1
            axes = axes_of_blocks(operand, cast)
            needed += [Divisor((operand, "block_size"), axis, size, may_pad) for axis in axes]
    for axis, name in zip(("in", "out", "tokens"), TRANSFORMS, strict=True):
        transform: Hadamard | None = getattr(gemms, name)
        if transform is not None:
            needed.append(Divisor((name, "size"), axis, transform.size))
    return needed


def token_divisors(model: nn.Module) -> list[Divisor]:
    """Return the blocks and transforms that lie along the token axis and so must divide a micro-batch's tokens.

    Experts have none of these: their rows are filled up with zeros to a multiple of their `alignment`.
    """
    linears = (linear for linear in linears_in(model) if not linear.is_of_experts)
    return [divisor for linear in linears for divisor in divisors(linear.gemms) if divisor.axis == "tokens"]


def alignment(mixture: MixtureOfExperts) -> int:
    """Return the number that must divide an expert's rows, so that no block or transform lies in two experts."""
    recipes = (mixture.up.gemms, mixture.w2.gemms)
    along_tokens = (d.size for gemms in recipes for d in divisors(gemms, with_padded=True) if d.axis == "tokens")
    return math.lcm(ALIGN, *along_tokens)


def token_block(model: nn.Module) -> int:
    """Return the number that must divide the tokens of a micro-batch; 1 if no block or transform lies along them."""
    return math.lcm(*(divisor.size for divisor in token_divisors(model)))


def check_tokens(model: nn.Module, tokens: str, number: int, forward: bool = False) -> None:
    """Raise ConfigError if blocks or transforms do not divide `number`. `tokens`: how the message begins, 'KEY: 48'.

    `forward`: no gradient is computed of these tokens.
    """
    for divisor in token_divisors(model):
        if forward and not divisor.field[0].startswith("forward"):
            continue
        where = f" ({divisor.field[0]})" if divisor.field[0] in TRANSFORMS else ""
        require(number % divisor.size == 0, f"{tokens} do not divide into {divisor}{where}")
