"""The words that can stand at the end of a command: groups with their choices, keys with their values, commands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from mxstudy import scripts
from mxstudy.config.conf_folders import STARTS
from mxstudy.help.group_choices import groups
from mxstudy.help.meanings import CHOSEN, classes, sections
from mxstudy.reader import type_hints

COMPLETION = "completion"
COMMANDS = (*scripts.COMMANDS, COMPLETION)
OPTIONS = ("--cfg", "--help")
LAUNCH = {"launch": ["status", "cancel", "retry"]}
CONSTANTS: dict[Any, tuple[str, ...]] = {bool: ("true", "false"), type(None): ("null",)}
Hints = tuple[Any, ...]  # the types of a key, one for each class that has it


def candidates(words: Sequence[str], shells: Iterable[str]) -> list[str]:
    """Return the possible completions of the last word; those that need more after them end in = or a point.

    If there are none, the word is the name of a file, or a value that the user chooses freely.
    """
    *before, word = words or [""]
    return [one for one in dict.fromkeys(words_after(before, word, shells)) if one.startswith(word)]


def words_after(before: Sequence[str], word: str, shells: Iterable[str]) -> Iterable[str]:
    """Return words that can follow `before`; all possible ones that begin with `word` are among them."""
    match before:
        case []:
            return (*overrides(word), *COMMANDS, *OPTIONS, "--version")
        case [scripts.FIGURE]:
            return scripts.names()
        case [first] if first == COMPLETION:
            return shells
        case [first, *_] if first in COMMANDS:
            return ()
        case [*_, "--cfg"]:
            return ("job",)
        case _ if "--help" in before:
            return (name.removesuffix("=") for name in overrides(word))
        case _:
            return (*overrides(word), *OPTIONS)


def overrides(word: str) -> Iterator[str]:
    """Yield the possible continuations of an override: the next part of its key, or a value."""
    plus = "+" if word.startswith("+") else ""
    key, is_value, value = word.removeprefix("+").partition("=")
    if is_value:
        sweep = value[: value.rfind(",") + 1]
        yield from (f"{plus}{key}={sweep}{one}" for one in values_of(key) if one not in sweep.split(","))
        return
    added = (*STARTS, *LAUNCH)
    yield from (f"+{group}=" for group in added)
    yield from (f"{plus}{group}=" for group in groups() if group not in added)
    yield from (f"{plus}{part}" for part in next_parts(key))


def values_of(key: str) -> list[str]:
    """Return the choices of a group, or the values of a key that has few."""
    known = groups() | LAUNCH
    hints = (hint for path, hints in keys().items() if is_path_of(path, key) for hint in hints)
    return known[key] if key in known else [value for hint in hints for value in values_of_type(hint)]


def values_of_type(hint: Any) -> list[str]:
    """Return the values of a type that has only a few, as they are written on the command line."""
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    return [*CONSTANTS.get(hint, ())] or [value for part in get_args(hint) for value in values_of_type(part)]


def next_parts(typed: str) -> Iterator[str]:
    """Yield every key that begins with this text, up to its next point; a part NAME is a user's own name."""
    above, point, _ = typed.rpartition(".")
    depth = typed.count(".")
    for path in keys():
        parts = path.split(".")
        if len(parts) > depth and parts[depth] != "NAME" and is_path_of(".".join(parts[:depth]), above):
            yield f"{above}{point}{parts[depth]}" + ("=" if len(parts) == depth + 1 else ".")


def is_path_of(path: str, key: str) -> bool:
    """Return whether a path of the schema, in which NAME stands for any, is that of this key."""
    parts, given = path.split("."), key.split(".")
    return len(parts) == len(given) and all(p in (g, "NAME") for p, g in zip(parts, given, strict=True))


def keys() -> Mapping[str, Hints]:
    """Return every key that a command can set, with its types: without sections, and without the items of lists."""
    found: dict[str, Hints] = defaultdict(tuple)
    for cls, places in sections().items():
        for place in places:
            for name, hint in type_hints(cls).items():
                found[f"{place}.{name}".lstrip(".")] += (hint,)
    lists = {key for key, hints in found.items() if any(get_origin(hint) is tuple and classes(hint) for hint in hints)}
    items = {key for key in found if key.startswith(tuple(f"{one}." for one in lists))}
    chosen = {key for key in found if key.rpartition(".")[2] in CHOSEN}
    sections_alone = {key for key, hints in found.items() if all(map(classes, hints))} - lists
    return {key: hints for key, hints in found.items() if key not in items | chosen | sections_alone}
