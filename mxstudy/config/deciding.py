"""Find the fields of a run's config that decide its numbers, with their values, from the config as one flat dict.

A flat config has dotted keys, as `mxstudy.reader.flatten` makes them and as tables have them in their columns. It may
be of an earlier version of the schema.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_origin

from mxstudy.config.casts import OPERANDS, TRANSFORMS, Cast, Hadamard
from mxstudy.config.precision_plan import EARLIER_BACKENDS
from mxstudy.config.run import STUDIES, Run
from mxstudy.reader import default_of, flatten, kinds_of, plain, type_hints

Flat = Mapping[str, Any]
Value = bool | float | str | tuple[tuple[str, Any], ...] | None
Kinds = frozenset[tuple[str, str]]  # a config's study, and the `kind` of each of its parts
PLAN, RECIPES, BACKEND = ".plan.", "precision.recipes", "precision.backend"


class Field(NamedTuple):
    """A field of the schema, by its dotted key. `decides`: it, or the thing it names, decides numbers."""

    key: str
    cosmetic: bool
    decides: bool
    default: Value


def cosmetic_columns(study: str) -> tuple[str, ...]:
    """Return the cosmetic columns of a study's runs; a column stands for all columns below it."""
    return tuple(dict.fromkeys(f"config.{field.key}" for field in _all_fields(STUDIES[study]) if field.cosmetic))


def deciding(config: Flat) -> dict[str, Value]:
    """Return the value of every field that decides a run's numbers, by its dotted key.

    A field that the config lacks has its default. A sequence or a mapping is one value, a tuple of (key in it, scalar).
    A key that the schema lacks stands for itself. A recipe counts by its computation, not by its name.
    """
    kinds = kinds_in(config)
    return canonical({**defaults_of(kinds), **set_in(config, kinds)})


def kinds_in(config: Flat) -> Kinds:
    """Return the kinds of a flat config, which decide the fields that it can have."""
    return frozenset((k, str(v)) for k, v in config.items() if k == "study" or k.endswith("kind"))


@functools.cache
def defaults_of(kinds: Kinds) -> Mapping[str, Value]:
    """Return the defaults, where there are any, of the fields that decide the numbers of runs of these kinds."""
    fields = fields_of(kinds).values()
    return {field.key: field.default for field in fields if field.decides and field.default is not None}


def set_in(part: Flat, kinds: Kinds) -> dict[str, Value]:
    """Return the values that `part` sets, part of a flat config of these kinds; null counts as not set."""
    fields, owners = fields_of(kinds), owners_in(kinds)
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, given in part.items():
        value, owner = scalar(given), owners[key]
        if value is not None and (owner not in fields or fields[owner].decides):
            found[owner][key[len(owner) + 1 :]] = value
    return {key: parts[""] if parts.keys() == {""} else tuple(sorted(parts.items())) for key, parts in found.items()}


def canonical(values: dict[str, Value]) -> dict[str, Value]:
    """Return the values, with the config's own recipes in place of their names in the plan.

    A recipe's field at its default is left out, so that a field that is added to the schema later parts no arms.
    """
    own: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in as_items(values.pop(RECIPES, None)):
        name, _, rest = key.partition(".")
        if rest not in RECIPE_DEFAULTS or RECIPE_DEFAULTS[rest] != value:
            own[name][rest] = value
    for key in [key for key in values if own and key.endswith("precision.schedule")]:
        values[key] = tuple(
            (part, tuple(sorted(own[value].items())) if PLAN in f".{part}" and value in own else value)
            for part, value in as_items(values[key])
        )
    if BACKEND in values:
        values[BACKEND] = EARLIER_BACKENDS.get(str(values[BACKEND]), values[BACKEND])
    return values


def as_items(value: Value) -> tuple[tuple[str, Any], ...]:
    return value if isinstance(value, tuple) else ()


def starts_of(key: str) -> Iterator[str]:
    """Yield 'a', 'a.b' and 'a.b.c' of 'a.b.c'."""
    words = key.split(".")
    return (".".join(words[:count]) for count in range(1, len(words) + 1))


def scalar(value: Any) -> Any:
    """Return a value in a form that makes equal values equal: numbers as float if possible, None for NaN."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return None if math.isnan(value) else float(value) if float(value) == value else value
    return str(value)


def value_of(default: Any) -> Value:
    """Return a field's default as a value, or None if it has none."""
    if default is dataclasses.MISSING or default is None:
        return None
    items = plain(default)
    if not isinstance(items, dict | list):
        return scalar(items)
    flat = {key: scalar(value) for key, value in flatten({"": items}).items()}
    return tuple(sorted((key[1:], value) for key, value in flat.items() if value is not None)) or None


@functools.cache
def fields_of(kinds: Kinds) -> dict[str, Field]:
    """Return the fields of runs of these kinds, by their dotted keys."""
    of = dict(kinds)
    return {field.key: field for field in _fields(STUDIES.get(of.get("study", ""), Run), of)}


class Owners(dict[str, str]):
    """Map each key of a flat config to its field, or to itself if the schema has none. A key is looked up once."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        super().__init__()
        self.fields = fields

    def __missing__(self, key: str) -> str:
        return self.setdefault(key, next((start for start in starts_of(key) if start in self.fields), key))


@functools.cache
def owners_in(kinds: Kinds) -> Owners:
    return Owners(fields_of(kinds))


def _fields(hint: Any, kinds: Flat, prefix: str = "") -> Iterator[Field]:
    if entry := _entry(hint):
        names = {key.removeprefix(prefix).partition(".")[0] for key in kinds if key.startswith(prefix)}
        return (field for name in sorted(names) for field in _fields(entry, kinds, f"{prefix}{name}."))
    option = _chosen(_options(hint), kinds.get(f"{prefix}kind"))
    return iter(()) if option is None else _fields_in(option, prefix, lambda part, key: _fields(part, kinds, key))


def _all_fields(hint: Any, prefix: str = "") -> Iterator[Field]:
    """Yield the fields of a dataclass, or of each dataclass in a union."""
    for option in _options(hint):
        yield from _fields_in(option, prefix, _all_fields)


def _fields_in(option: Any, prefix: str, inside: Any) -> Iterator[Field]:
    hints = type_hints(option)
    for field in dataclasses.fields(option):
        key, cosmetic = f"{prefix}{field.name}", field.metadata.get("cosmetic", False)
        if (_options(hints[field.name]) or _entry(hints[field.name])) and not cosmetic:
            yield from inside(hints[field.name], f"{key}.")
        else:
            decides = not cosmetic or field.metadata.get("names", False)
            yield Field(key, cosmetic, decides, value_of(default_of(field)))


def _options(hint: Any) -> list[Any]:
    """Return the dataclasses that a field may hold, alone or in a union; none for sequences of dataclasses."""
    whole = () if get_origin(hint) in (tuple, dict) else get_args(hint)
    return [each for each in (hint, *whole) if dataclasses.is_dataclass(each)]


def _entry(hint: Any) -> Any:
    """Return the type of a mapping's values if these are one of several dataclasses, told apart by kind."""
    values = get_args(hint)[1] if get_origin(hint) is dict else None
    return values if len(_options(values)) > 1 else None


def _chosen(options: list[Any], kind: Any) -> Any:
    if len(options) < 2:
        return options[0] if options else None
    return kinds_of(tuple(options)).get(str(kind))


def _recipe_defaults() -> dict[str, Value]:
    """Return the default of every field of a recipe's operands and transforms, by its dotted key."""
    parts = dict.fromkeys(OPERANDS, Cast) | dict.fromkeys(TRANSFORMS, Hadamard)
    fields = {part: {f.name: plain(default_of(f)) for f in dataclasses.fields(cls)} for part, cls in parts.items()}
    return {key: scalar(value) for key, value in flatten(fields).items() if value is not dataclasses.MISSING}


RECIPE_DEFAULTS = _recipe_defaults()
