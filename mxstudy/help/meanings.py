"""The meaning of every key of a config, read from the docstrings and comments of the schema's dataclasses.

A docstring says of a field "`name`: what it is", or names it in a sentence; a field may have a comment instead.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from mxstudy.config.launcher import LAUNCHERS
from mxstudy.config.run import STUDIES
from mxstudy.config.settings import written
from mxstudy.reader import MISSING, default_of, plain, type_hints

LABEL = re.compile(r"(?:`\w+`(?:, | and )?)+(?:(?<=`) of [^:`]+)?: ")
SENTENCE = re.compile(r"(?<=\.)\s+(?=[`A-Z])")
TYPES = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null", Any: "any"}
UNITS = {  # by a key's last name
    r"(.*_)?steps?(_.*)?|intervene_before": "steps",
    r".*fraction|.*_ratio|fractions|headroom": "fraction",
    r"sequence_length|original_length|window|stride|tokens_per_batch": "tokens",
    r"sequences": "sequences",
    r".*_s": "s",
    r"time_min": "min",
    r"memory_gb": "GB",
    r"train_bytes": "bytes",
    r"max_documents|documents": "documents",
    r"hidden_size|ffn_size|head_dim": "features",
    r"block_size": "elements",
}
CHOSEN = {"kind": "set by the choice of the group", "study": "the kind of run, set by the experiment"}


class Key(NamedTuple):
    """A field of a class of the schema, in words."""

    name: str
    type: str
    default: str
    unit: str
    meaning: str


def meaning(cls: type, name: str) -> str:
    """Return the meaning of a field, in the words of a class that declares it, or "" if there are none."""
    if name in CHOSEN:
        return CHOSEN[name]
    owners = [base for base in cls.__mro__ if name in vars(base).get("__annotations__", {})]
    said = next(filter(None, (of_field(owner, name) for owner in owners)), None)
    return (said or of_type(type_hints(cls)[name])).rstrip(".;")


def of_field(cls: type, name: str) -> str:
    """Return a class's words on its own field: its comment and the text after its name, or sentences with it."""
    both = [said.rstrip(".;") for said in (of_comment(cls, name), of_label(cls, name)) if said]
    return ". ".join(both) or of_mention(cls, name)


def of_label(cls: type, name: str) -> str:
    """Return the text after "`name`:" in the docstring."""
    for text in paragraphs(cls):
        labels = [*LABEL.finditer(text)]
        for label, end in zip(labels, [*(each.start() for each in labels[1:]), len(text)], strict=False):
            if f"`{name}`" in label[0]:
                return text[label.end() : end].strip()
    return ""


def of_mention(cls: type, name: str) -> str:
    """Return the sentences of the docstring that have `name`."""
    return " ".join(part for text in paragraphs(cls) for part in SENTENCE.split(text) if f"`{name}`" in part)


def paragraphs(cls: type) -> list[str]:
    return [" ".join(part.split()) for part in said_of(cls).split("\n\n")]


def said_of(cls: type) -> str:
    """Return a class's own docstring, or "" if it has none (a dataclass then has its signature there)."""
    doc = cls.__doc__ or ""
    return "" if doc.startswith(f"{cls.__name__}(") else inspect.cleandoc(doc)


@functools.cache
def source(cls: type) -> list[str]:
    return inspect.getsource(cls).splitlines()


def of_comment(cls: type, name: str) -> str:
    """Return the comment beside a field, or above it."""
    lines = source(cls)
    place = next(number for number, line in enumerate(lines) if re.match(rf"    {name}:", line))
    beside = lines[place].partition("  # ")[2]
    above: list[str] = []
    while not beside and lines[place - 1].startswith("    # "):
        place -= 1
        above.insert(0, lines[place].removeprefix("    # "))
    return beside or " ".join(above)


def of_type(hint: Any) -> str:
    """Return the first sentences of the classes that a field can be."""
    return " Or: ".join(filter(None, map(first_sentence, classes(hint))))


def first_sentence(cls: type) -> str:
    """Return the first sentence of a class's docstring, or "" if it is about one of its fields."""
    first = paragraphs(cls)[0]
    return "" if LABEL.match(first) else SENTENCE.split(first)[0]


def classes(hint: Any) -> list[type]:
    """Return the dataclasses in a type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [cls for part in get_args(hint) for cls in classes(part)]


def words(hint: Any) -> str:
    """Return a type as a user would say it."""
    parts = [part for part in get_args(hint) if part is not Ellipsis]
    if get_origin(hint) is Literal:
        return " or ".join(map(str, parts))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys("keys" if classes(part) else words(part) for part in parts))
    if get_origin(hint) is tuple:
        of = "keys" if classes(hint) else words(parts[0])
        return f"list of {of}" if Ellipsis in get_args(hint) else f"list of {len(parts)} of {of}"
    if get_origin(hint) is dict:
        return f"names, each with {'keys' if classes(hint) else words(parts[1])}"
    return "keys" if classes(hint) else TYPES.get(getattr(hint, "__supertype__", hint), str(hint))


def unit(name: str, hint: Any) -> str:
    """Return the unit of a number, from its name, or "" if it has none."""
    is_number = any(part in str(hint) for part in ("int", "float", "Unbounded")) and not classes(hint)
    return next((unit for pattern, unit in UNITS.items() if is_number and re.fullmatch(pattern, name)), "")


@functools.cache
def keys(cls: type) -> tuple[Key, ...]:
    """Return the keys of a class of the schema, in their order."""
    found = []
    for field in dataclasses.fields(cls):
        hint = type_hints(cls)[field.name]
        default = default_of(field)
        shown = "" if default is MISSING else "keys" if dataclasses.is_dataclass(default) else written(plain(default))
        found.append(Key(field.name, words(hint), shown, unit(field.name, hint), meaning(cls, field.name)))
    return tuple(found)


@functools.cache
def sections() -> Mapping[type, Mapping[str, tuple[str, ...]]]:
    """Return the places of every class of the schema: {class: {dotted path: kinds of run}}; "" is the run itself."""
    found: dict[type, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    roots: list[tuple[str, type, str]] = [(name, cls, "") for name, cls in STUDIES.items()]
    roots += [(f"hydra/launcher={name}", cls, "hydra.launcher") for name, cls in LAUNCHERS.items()]
    for root, cls, path in roots:
        for inside, where in below(cls, path):
            found[inside][where][root] = None
    return {cls: {path: tuple(of) for path, of in places.items()} for cls, places in found.items()}


def below(cls: type, path: str) -> Iterator[tuple[type, str]]:
    """Yield a class with its path, and all classes of its fields with theirs; NAME stands for any name."""
    yield cls, path
    for name, hint in type_hints(cls).items():
        for inside in classes(hint):
            named = ".NAME" if "dict" in str(hint) else ""
            yield from below(inside, f"{path}.{name}{named}".lstrip("."))
