"""The strict reader behind every config: plain data to frozen dataclasses, and back.

An unknown key and a missing key are errors, and no value is converted except int to float. Every error names the full
key, what is wrong and what would be right. This file uses the standard library only: a job on a node needs neither
Hydra nor OmegaConf.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, NewType, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

T = TypeVar("T")
Unbounded = NewType("Unbounded", float)  # the type of a field that may be infinite


class ConfigError(ValueError):
    """Raised for a config that cannot be run; the message gives the full key, what is wrong and what would be right."""


def cosmetic(default: Any = MISSING, **kwargs: Any) -> Any:
    """Return a dataclass field that cannot change a run's numbers and is left out of its fingerprint."""
    return field(default=default, metadata={"cosmetic": True}, **kwargs)


def named(default: Any = MISSING, **kwargs: Any) -> Any:
    """Return a cosmetic field that names or locates something whose identity is hashed instead; it parts arms."""
    return field(default=default, metadata={"cosmetic": True, "names": True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def schema(of: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are given by name."""
    return dataclass(frozen=True, kw_only=True)(of)


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, in their order."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_at_most(value: Any, most: Mapping[str, int]) -> None:
    """Raise ConfigError unless each of these fields is positive and at most this mapping's number."""
    for name, largest in most.items():
        number = getattr(value, name)
        require(0 < number <= largest, f"{name}: must lie in 1 .. {largest:,}, not {number}")


def one_line(error: BaseException) -> str:
    """Return an error's text as one line, an OSError's with the file that it names."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def root_of(error: BaseException) -> BaseException:
    """Return the first error in a chain of errors that were raised from each other."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def changed(value: T, **fields: Any) -> T:
    """Return a copy of a schema's instance with these fields changed."""
    return dataclasses.replace(value, **fields)  # type: ignore[type-var]


def suggest(word: str, choices: Iterable[object]) -> str:
    """Return "did you mean 'X'?" if a choice is similar to the word, else a list of all choices."""
    names = [str(choice) for choice in choices]
    near = difflib.get_close_matches(str(word), names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(names)}"


def key_in(path: str, key: object) -> str:
    """Return the full key of a mapping's value, as a user types it: PATH.KEY, or PATH[KEY] if KEY is no plain word."""
    return f"{path}.{key}" if re.fullmatch(r"[\w-]+", str(key)) else f"{path}[{key}]"


def read(hint: Any, value: Any, path: str = "") -> Any:
    """Return `value` as the type `hint`, converting nothing except int to float.

    `path`: the full key of the value, for messages. Raises ConfigError for an unknown key, a missing key or a wrong
    type.
    """
    where = path or "config"
    if hint in (float, Unbounded):
        return _read_number(value, where, hint is Unbounded)
    if type(value) is hint:
        return value
    if dataclasses.is_dataclass(hint):
        return _read_dataclass(hint, value, path)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_union(args, value, path)
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in args):
            raise ConfigError(f"{where}: {value!r} is not a choice; {suggest(value, args)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            advice = f"; write '{where}=[{value}]'" if args[0] is type(value) is str else ""
            raise ConfigError(f"{where}: {value!r} is not a list{advice}")
        items = args[:1] * len(value) if args[-1] is Ellipsis else args
        require(len(items) == len(value), f"{where}: needs {len(items)} values, not {len(value)}")
        return tuple(read(item, v, f"{path}[{i}]") for i, (item, v) in enumerate(zip(items, value, strict=True)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {value!r} is not a mapping")
        return {read(args[0], k, path): read(args[1], v, key_in(path, k)) for k, v in value.items()}
    raise ConfigError(f"{where}: {value!r} is not {_article(hint)}{_advice(hint, value, where)}")


def _read_number(value: Any, where: str, may_be_infinite: bool) -> float:
    """Return an integer or float as a float, finite unless the field says otherwise."""
    require(type(value) in (int, float), f"{where}: {value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond 1e308
        number = math.inf
    is_bounded = math.isfinite(number) or (may_be_infinite and not math.isnan(number))
    require(is_bounded, f"{where}: must be a finite number, not {number}")
    return number


def _read_dataclass(cls: Any, value: Any, path: str) -> Any:
    if isinstance(value, cls):
        return value
    _require_mapping(value, path or "config")
    hints = type_hints(cls)
    prefix = f"{path}." if path else ""
    for key in value.keys() - hints.keys():
        raise ConfigError(f"{prefix}{key}: no such key; {suggest(str(key), hints)}")
    missing = [f.name for f in dataclasses.fields(cls) if value.get(f.name, default_of(f)) in (MISSING, "???")]
    require(not missing, f"{prefix}{missing[0] if missing else ''}: missing; it has no default")
    fields = {key: read(hints[key], v, prefix + key) for key, v in value.items()}
    try:
        return cls(**fields)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


def _require_mapping(value: Any, where: str) -> None:
    require(value is not None, f"{where}: null; this kind of run needs one")
    if not isinstance(value, Mapping):  # not `require`: a mapping's text takes longer to make than the mapping to read
        raise ConfigError(f"{where}: {value!r} is not a mapping")


def _read_union(options: tuple[Any, ...], value: Any, path: str) -> Any:
    """Read X or None, one of several dataclasses, which are told apart by their field `kind`, or of several types."""
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if len(options) == 1:
        return read(options[0], value, path)
    if not any(map(dataclasses.is_dataclass, options)):
        return _read_one_of(options, value, path)
    kinds = kinds_of(options)
    _require_mapping(value, path)
    kind = value.get("kind")
    if str(kind) not in kinds:  # a list cannot be looked up
        raise ConfigError(f"{path}.kind: {kind!r} is not a choice; {suggest(str(kind), kinds)}")
    return read(kinds[str(kind)], value, path)


def _read_one_of(options: tuple[Any, ...], value: Any, path: str) -> Any:
    """Return the value as the first of these types that can hold it."""
    for option in options:
        try:
            return read(option, value, path)
        except ConfigError:
            continue
    raise ConfigError(f"{path or 'config'}: {value!r} is not {' or '.join(map(_article, options))}")


def kinds_of(options: tuple[Any, ...]) -> dict[str, Any]:
    """Return the dataclasses as a dict from the value of their field `kind`."""
    return {get_args(type_hints(option)["kind"])[0]: option for option in options}


def _advice(hint: Any, value: Any, where: str) -> str:
    """Return what to write for a string of digits, for example a fingerprint, or for a range of integers."""
    if hint is str and type(value) in (int, float):
        return f"; for a string of digits write '{where}=\"{value}\"'"
    if hint is int and type(value) is str and re.fullmatch(r"\d+(\.\.|:|-)\d+", value):
        return f"; for several runs write {where}=0,1,2"
    return ""


def _article(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a list of {len(get_args(hint))}"
    return {bool: "true or false", int: "an integer", str: "a string"}.get(hint, str(hint))


def default_of(f: dataclasses.Field[Any]) -> Any:
    """Return a field's default, or MISSING if it has none."""
    return f.default_factory() if f.default_factory is not MISSING else f.default


def plain(value: Any) -> Any:
    """Return dataclasses, tuples and mappings as the dicts and lists that YAML and JSON can hold."""
    if value is None or isinstance(value, str | int | float):  # most are, and the checks below take longer
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def defaults(cls: Any) -> dict[str, Any]:
    """Return a schema's defaults as plain data; '???' (Hydra's mark for "must be given") if a field has none."""
    values = {f.name: default_of(f) for f in dataclasses.fields(cls)}
    return {name: "???" if value is MISSING else plain(value) for name, value in values.items()}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings and lists as one dict with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
