"""The check for settings of `precision.*` that have no effect.

A setting fills every operand that leaves it open; an operand that fixes it keeps its own value, and the plan reports
this. A setting that no operand uses has no effect. If a recipe quantises something, it is refused. If nothing is
quantised, an experiment may set it for its other arms, and it is refused only on the command line. So is one that the
command line sets to its default, unless this undoes what an experiment sets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from mxstudy.config.casts import BLOCKS_OWN, SETTINGS, Cast, Gemms
from mxstudy.config.precision_plan import BLOCKS, Precision
from mxstudy.reader import ConfigError

LACKS = {"scale_rule": "E8M0 scales to round by it", "block_size": "blocks", "pad": "blocks"}
OF_THE_PLAN = ("head", "skip_blocks")  # settings that say where recipes apply


class UnusedSetting(NamedTuple):
    """A setting without effect, and the reason. `refused`: an error anywhere, not only on the command line.

    Nothing is refused anywhere but a setting that differs from its default.
    """

    setting: str
    message: str
    refused: bool


def unused_settings(precision: Precision, norm_reads: Collection[str] = ()) -> Iterator[UnusedSetting]:
    """Yield every setting that no operand uses in any row of the schedule, also if it has its default.

    `norm_reads`: the settings that the norms and their gains use. Raises ConfigError if a recipe does not exist.
    """
    casts = casts_of(precision)
    for field, setting in SETTINGS.items():
        if setting not in norm_reads and (why := why_unused(precision, field, casts)):
            yield why
    for setting in OF_THE_PLAN if not casts else ():
        yield nothing_quantised(precision, setting)
    if casts and precision.head and all(precision.recipe(row.plan[BLOCKS]) == Gemms() for row in precision.schedule):
        remedy = "or give that pattern a recipe that quantises"
        yield UnusedSetting("head", message(precision, "head", f"{BLOCKS!r} is not quantised", remedy), True)


def reads_of_gain(gain: str | None) -> tuple[str, ...]:
    """Return the settings that the rounding of norms' gains uses, besides those of a linear's casts."""
    return ("operand_pre_round",) if gain == "bf16" else ()  # it decides where ties go


def casts_of(precision: Precision) -> dict[tuple[str, str], Cast]:
    """Return {(recipe, operand): cast} of the whole schedule. Raises ConfigError if a recipe does not exist."""
    casts: dict[tuple[str, str], Cast] = {}
    for row in precision.schedule:
        for pattern, name in row.plan.items():
            try:
                recipe = precision.recipe(name)
            except ConfigError as error:
                raise ConfigError(f"precision.schedule: from step {row.from_step}, {pattern!r}: {error}") from None
            casts |= {(name, operand): cast for operand, cast in recipe.casts()}
    return casts


def is_set(precision: Precision, setting: str) -> bool:
    """Return whether the setting differs from its default."""
    return bool(getattr(precision, setting) != getattr(Precision, setting))


def why_unused(precision: Precision, field: str, casts: dict[tuple[str, str], Cast]) -> UnusedSetting | None:
    """Return why no operand uses the setting of this field, or None if one does, or if all have its value anyway."""
    setting = SETTINGS[field]
    value = getattr(precision, setting)
    if not casts:
        return nothing_quantised(precision, setting)
    having = {operand: cast for operand, cast in casts.items() if cast.has(field)}
    fixed = {operand: getattr(cast, field) for operand, cast in having.items() if getattr(cast, field) != value}
    if any(cast.is_open(field) for cast in having.values()) or (having and not fixed):
        return None
    if having:
        why = f"every operand fixes its own ({listed(fixed)})"
        remedy = "or take a variant of the recipe that leaves it open, as a new file in conf/precision"
    else:
        names = " and ".join(dict.fromkeys(name for name, _ in casts))
        operands = ", ".join(dict.fromkeys(operand for _, operand in casts))
        why, remedy = f"no operand of {names} ({operands}) has {LACKS[field]}", "or take another recipe"
    refused = is_set(precision, setting) and (bool(having) or field not in BLOCKS_OWN)
    return UnusedSetting(setting, message(precision, setting, why, remedy), refused)


def nothing_quantised(precision: Precision, setting: str) -> UnusedSetting:
    remedy = "or choose a precision that quantises, such as mxfp8"
    return UnusedSetting(setting, message(precision, setting, "nothing is quantised", remedy), False)


def message(precision: Precision, setting: str, why: str, remedy: str) -> str:
    """Return what is wrong, and how to undo it: an experiment's setting must be overridden, not only left out."""
    value, default = (written(getattr(of, setting)) for of in (precision, Precision))
    undo = f"write precision.{setting}={default}" if is_set(precision, setting) else "leave it out"
    return f"precision.{setting}: {value} is set, and {why}; {undo}, {remedy}"


def written(value: Any) -> str:
    """Return the value as it is written on the command line."""
    if isinstance(value, tuple | list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or '""'


def listed(fixed: dict[tuple[str, str], Any]) -> str:
    """Return the fixed values by recipe: 'mine: even in forward_x, forward_w, stochastic in dgrad_dh'."""
    recipes: dict[str, dict[Any, list[str]]] = defaultdict(lambda: defaultdict(list))
    for (name, operand), value in fixed.items():
        recipes[name][value].append(operand)
    parts = []
    for name, values in recipes.items():
        own = [f"{written(value)} in {', '.join(operands)}" for value, operands in values.items()]
        parts.append(f"{name}: {', '.join(own)}")
    return "; ".join(parts)
