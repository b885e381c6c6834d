"""Describe the precision plan as applied: recipes, settings off their defaults, and backends, as lines of text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace

from torch import nn

from mxstudy.config.casts import SETTINGS, TRANSFORMS, BlockCast, Cast, Gemms, Hadamard
from mxstudy.config.settings import written
from mxstudy.model.backends import describe_backends
from mxstudy.model.decoder import Decoder
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.modules import modules_of
from mxstudy.model.moe import SharedUp, mixtures_of
from mxstudy.model.norm import MXNorm
from mxstudy.model.norm_casts import has_own_blocks, norm_read
from mxstudy.model.precision import AXES, norm_settings
from mxstudy.model.vector_settings import norms_of
from mxstudy.numerics.formats import FORMATS, is_random
from mxstudy.numerics.vector_ops import VectorCast, along_vector

UNQUANTISED = "unquantised"
OUTER = {"bound": "one scale by the norm's bound", "row": "one scale a {line}"}


def describe(model: nn.Module, rows: Mapping[str, str], forward_only: bool = False) -> str:
    """Return the plan as applied, one line per recipe (number of linears, casts of each GEMM) and one per backend.

    `forward_only`: describe the forward GEMM alone, for a model that is evaluated and not trained.
    """
    linears = modules_of(model, MXLinear)
    scaled = {name: as_scaled(linears[name]) for name in rows}
    applied = {name: forward_of(gemms) for name, gemms in scaled.items()} if forward_only else scaled
    groups = Counter((row, applied[name]) for name, row in rows.items())
    plan = [
        f"{count} linear{'s' * (count > 1)} in {row}: {describe_gemms(gemms, forward_only)}"
        for (row, gemms), count in groups.items()
    ]
    notes = [
        f"{row}: a scale or random signs span a micro-batch: numbers depend on its size and on the number of ranks"
        for row in {row: None for row, gemms in groups if spans_micro_batch(gemms)}
    ]
    if not forward_only and any(mixture.moe.balance == "loss" for mixture in mixtures_of(model).values()):
        notes.append(
            "model.moe.balance=loss: it is over a micro-batch: numbers depend on its size and on the number of ranks"
        )
    if not forward_only:
        notes += describe_codes_of_w({name: linears[name] for name in rows}, rows)
    notes += describe_estimates(linears.values())
    notes += describe_unquantised_blocks(applied) + describe_vector_settings(model)
    settings = next((linear.cast for linear in linears.values()), BlockCast())
    notes += describe_settings(settings, groups, norm_settings(model))
    return "\n".join([*plan, *notes, *describe_backends(model)])


def describe_codes_of_w(linears: Mapping[str, MXLinear], rows: Mapping[str, str]) -> list[str]:
    """Return notes on whether forward and dgrad multiply with the same codes of W, for recipes made so that they do."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for name, linear in linears.items():
        w, of_dgrad = linear.gemms.forward_w, linear.gemms.dgrad_w
        if w and of_dgrad and w.two_dimensional and of_dgrad.two_dimensional:
            groups[rows[name]].append(has_same_codes_of_w(linear))
    same = "forward and dgrad multiply with the same codes of W"
    return [f"{row}: {same}" + ("" if all(had) else f" in {sum(had)} of {len(had)}") for row, had in groups.items()]


def has_same_codes_of_w(linear: MXLinear) -> bool:
    """Return whether forward and dgrad multiply with the same codes of W, bit by bit.

    They do if both quantise the same tensor (the gain is folded in both or in neither) by the same cast, if the cast is
    not random, if its blocks are the same along either axis, and if no transform comes before it.
    """
    gemms, cast = linear.gemms, linear.gemms.forward_w
    if cast is None or cast != gemms.dgrad_w or gemms.forward_transform or gemms.dgrad_transform or is_random(cast):
        return False
    norm = norm_read(linear) if isinstance(linear, NormLinear | SharedUp) else None
    is_one_tensor = norm is None or norm.fold_gain == norm.fold_gain_in_dgrad
    return is_one_tensor and (cast.two_dimensional or (cast.scale == "none" and cast.outer_scale == "tensor"))


def describe_estimates(linears: Iterable[MXLinear]) -> list[str]:
    """Return a note for each kind of blocks from which MXNorms estimate the RMS: the size, and the blocks' cast."""
    kinds = Counter(
        (linear.norm.block_size, has_own_blocks(linear), linear.norm.transform)
        for linear in linears
        if isinstance(linear, NormLinear) and isinstance(linear.norm, MXNorm)
    )
    return [
        f"{count} MXNorms take the absmax of blocks of {block_size}, "
        + ("their own, because X is not cast in blocks" if own else "those of X's cast")
        + (f", under {describe_transform(transform)}" if transform else "")
        for (block_size, own, transform), count in kinds.items()
    ]


def describe_unquantised_blocks(applied: Mapping[str, Gemms]) -> list[str]:
    """Return a note on the blocks without a quantised linear, if other blocks have some."""
    blocks = {name: int(name.split(".")[1]) for name in applied if name.startswith("layers.")}
    quantised = {block for name, block in blocks.items() if applied[name] != Gemms()}
    left = [block for block in blocks.values() if block not in quantised]
    if not left or not quantised:
        return []
    numbers = ", ".join(map(str, sorted(set(left))))
    return [
        f"not quantised: block {numbers} of 0 to {max(blocks.values())}, {len(left) / len(blocks):.0%} of the linears"
    ]


def as_scaled(linear: MXLinear) -> Gemms:
    """Return the linear's recipe with the outer scales that it takes: one a row where it has no norm's bound."""
    if isinstance(linear, SharedUp) or (isinstance(linear, NormLinear) and not linear.is_apart):
        return linear.gemms
    bound = {name: cast for name, cast in linear.gemms.casts() if cast.outer_scale == "bound"}
    by_row = {name: replace(cast, outer_scale="row") for name, cast in bound.items()}
    return replace(linear.gemms, **by_row)  # type: ignore[arg-type]


def forward_of(gemms: Gemms) -> Gemms:
    """Return the recipe of the forward GEMM alone."""
    return Gemms(forward_x=gemms.forward_x, forward_w=gemms.forward_w, forward_transform=gemms.forward_transform)


def describe_settings(
    settings: BlockCast, recipes: Iterable[tuple[str, Gemms]], norm_reads: Collection[str]
) -> list[str]:
    """Return notes on settings off their defaults: operands that keep their own value, settings unused in this arm.

    Complete blocks are not padded (`without_idle_padding`), so an operand that leaves this open may be padded in some
    linears and not in others, as `describe_cast` says.
    """
    casts = {(row, operand): cast for row, gemms in recipes for operand, cast in gemms.casts()}
    lines, unused = [], []
    for field, setting in SETTINGS.items():
        value = getattr(settings, setting)
        if value == getattr(BlockCast, setting):
            continue
        assigned = f"precision.{setting}={written(value)}"
        having = {key: getattr(cast, field) for key, cast in casts.items() if cast.has(field)}
        if not having and setting not in norm_reads:
            unused.append(assigned)
        if field == "pad":
            lines += [f"{assigned}: the blocks of casts that are not called padded are complete"] if having else []
            continue
        keeping: dict[str, list[str]] = defaultdict(list)
        for (row, operand), own in having.items():
            if own != value:
                keeping[row].append(f"{operand} keeps {written(own)}")
        lines += [f"{row}: {assigned} fills what is left open; {', '.join(own)}" for row, own in keeping.items()]
    if unused:
        lines.append(f"{', '.join(unused)}: no operand here takes {'it' if len(unused) == 1 else 'them'}")
    return lines


def describe_vector_settings(model: nn.Module) -> list[str]:
    """Return a line on the gains and a line on the operations, each only if its rounding is not the default."""
    if not isinstance(model, Decoder):
        return []
    norms = norms_of(model)
    lines = []
    if any(norm.rounding is not None for norm, _ in norms.values()):
        counts = Counter(describe_rounding(norm.rounding) for norm, _ in norms.values())
        lines.append("gains and biases: " + ", ".join(f"{count} norms in {how}" for how, count in counts.items()))
    if any(norm.is_op_by_op for norm, _ in norms.values()):
        lines.append("vector operations: rounded to bf16 after each operation of a norm or an activation")
    return lines


def describe_rounding(rounding: VectorCast | None) -> str:
    """Return the rounding in words, e.g. 'mx (NVFP4, one scale a tensor)'."""
    if rounding is None:
        return "the compute dtype"
    if not isinstance(rounding.cast, Cast):
        return rounding.precision + (" (ties away from zero)" if rounding.away and rounding.precision == "bf16" else "")
    cast = along_vector(rounding.cast)
    return f"mx ({', '.join([cast.format, *notes_on(cast)])})"


def spans_micro_batch(gemms: Gemms) -> bool:
    """Return whether a scale of activations or gradients, or random signs, are shared by a micro-batch's tokens."""
    spans = any(cast.outer_scale == "tensor" and "tokens" in AXES[name] for name, cast in gemms.casts())
    transforms = (getattr(gemms, name) for name in TRANSFORMS)
    return spans or any(transform.signs == "call" for transform in transforms if transform is not None)


def describe_gemms(gemms: Gemms, forward_only: bool = False) -> str:
    if gemms == Gemms():
        return "no operand is cast"
    pairs = (  # with the line of each operand that its GEMM contracts
        ("forward", gemms.forward, ("row", "row")),
        ("dgrad", gemms.dgrad, ("row", "column")),
        ("wgrad", gemms.wgrad, ("column", "column")),
    )
    parts = []
    for name, gemm, lines in pairs[:1] if forward_only else pairs:
        left, right = map(describe_cast, (gemm.left, gemm.right), lines)
        both = f"{left} x {right}" if gemm.left or gemm.right else UNQUANTISED
        rotated = f", {describe_transform(gemm.transform)}" if gemm.transform else ""
        parts.append(f"{name} {both}{rotated}")
    return ", ".join(parts)


def describe_cast(cast: Cast | None, line: str = "row") -> str:
    """Return the cast's format and its unusual fields, e.g. 'E2M1 (16x16, stochastic)'.

    `line`: what has a scale of its own with outer_scale=row.
    """
    if cast is None:
        return UNQUANTISED
    notes = notes_on(cast, line)
    return f"{cast.format} ({', '.join(notes)})" if notes else cast.format


def notes_on(cast: Cast, line: str = "row") -> list[str]:
    """Return the cast's unusual fields in words; `line` as in `describe_cast`."""
    has_own_scales, outer = cast.scale == FORMATS[cast.format].scale, cast.outer_scale
    said = {
        "two_dimensional": f"{cast.block_size}x{cast.block_size}",
        "scale": "" if has_own_scales or cast.scale == "none" else f"{cast.scale} scales",
        "outer_scale": OUTER.get(outer, f"one scale a {outer}").format(line=line),
        "chain": f"{cast.chain} chain",
        "largest_scale": f"block scales up to {cast.largest_scale:g}",
        "rounding": cast.rounding,
        "source": "from the forward's cast",
        "mask_clipped": "gradients masked",
        "headroom": f"headroom {cast.headroom:.4g}",
        "pad": "padded",
        "candidates": f"candidates {', '.join(f'{factor:g}' for factor in cast.candidates)}",
        "block_size": "" if cast.two_dimensional or cast.scale == "none" else f"blocks of {cast.block_size}",
        "statistic": f"range by {cast.statistic}",
    }
    notes = [said.get(name, f"{name} {getattr(cast, name)}") for name in unusual(cast)]
    return list(filter(None, notes))


def unusual(cast: Cast) -> list[str]:
    """Return the names of the fields in which a cast differs from its format's plain cast under default settings."""
    usual = Cast(format=cast.format, block_size=FORMATS[cast.format].block_size).filled(BlockCast())
    values = {field.name: getattr(cast, field.name) for field in fields(cast)}
    return [name for name, value in values.items() if value is not None and value != getattr(usual, name, None)]


def describe_transform(transform: Hadamard) -> str:
    """Return the transform's size and signs, e.g. 'Hadamard 16 (signs by seed)'."""
    signs = "written signs" if transform.vector else f"signs by {transform.signs}" if transform.signs != "none" else ""
    notes = ", ".join(filter(None, (signs, "after it" if transform.signs_after else "")))
    return f"Hadamard {transform.size} ({notes})" if notes else f"Hadamard {transform.size}"
