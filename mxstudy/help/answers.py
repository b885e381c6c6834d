"""The answers of `--help NAME` in the terminal, for a key, a group, a choice or a probe; and comments in a config."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, get_args

from mxstudy.config.run import STUDIES
from mxstudy.help.group_choices import groups, said_of
from mxstudy.help.meanings import Key, classes, first_sentence, keys, sections
from mxstudy.reader import ConfigError, suggest, type_hints
from mxstudy.tracking.choices import given

WIDTH = 110
NO_DEFAULT = "none: a choice of the group, an experiment or the command gives it"
LINE = re.compile(r"(?P<indent> *(?:- )*)(?P<key>[^\s:#'\"-][^:]*):(?: (?P<value>.*))?$")
Path = tuple[str, ...]  # of a key, from the outside in
PART = re.compile(r"(?<=[.;])\s")


class KeyAt(NamedTuple):
    """A key at a dotted path, of one class of the schema, in some kinds of run."""

    path: str
    cls: type
    key: Key
    kinds: tuple[str, ...]


def places() -> Iterator[KeyAt]:
    """Yield every key of every kind of run."""
    for cls, found in sections().items():
        for path, kinds in found.items():
            yield from (KeyAt(f"{path}.{key.name}".lstrip("."), cls, key, kinds) for key in keys(cls))


def answer(name: str) -> str:
    """Return the help for a key, group, GROUP=CHOICE or probe. Raises ConfigError for another name."""
    name = name.lstrip("+")  # as a command has it: +experiment=NAME
    chosen, every = groups(), [*places()]
    group, is_choice, choice = name.partition("=")
    if is_choice:
        if choice not in chosen.get(group, ()):
            raise ConfigError(f"{name}: no such choice; {suggest(choice, chosen.get(group, chosen))}")
        return f"{name}\n{indented(said_of(group, choice))}"
    parts = [of_group(name)] if name in chosen else []
    inside = under(name, every) or under(f"probe.{name}", every)
    parts += [] if inside else [of_key(place) for place in merged(place for place in every if is_at(place.path, name))]
    parts += [of_section(cls, found) for cls, found in inside.items()]
    if not parts:
        near = [f"{group}={name}" for group, choices in chosen.items() if name in choices]
        near = near or difflib.get_close_matches(name, [*chosen, *(place.path for place in every)], n=1)
        raise ConfigError(f"{name}: no such key, group or probe; {suggest(name, near or chosen)}")
    return "\n\n".join(dict.fromkeys(parts))


def merged(found: Iterable[KeyAt]) -> list[KeyAt]:
    """Return each key once if the classes of several kinds of run describe it in the same words."""
    same: dict[tuple[str, Key, str], KeyAt] = {}
    for place in found:
        about = (place.path, place.key, kind_of(place.cls))
        kinds = same[about].kinds if about in same else ()
        same[about] = place._replace(kinds=(*kinds, *place.kinds))
    return [*same.values()]


def belongs_to(key: str) -> str:
    """Return the choices of a key's group that have the key, or else the kinds of run, or "" if nothing has it."""
    found, group = [place for place in places() if is_at(place.path, key)], key.partition(".")[0]
    kinds = {kind_of(place.cls) for place in found}
    chosen = {choice: (given(group, choice) or {}).get(f"{group}.kind") for choice in groups().get(group, ())}
    owners = [f"{group}={choice}" for choice, kind in chosen.items() if kind in kinds]
    kinds_of_run = {kind for place in found for kind in place.kinds}
    return " or ".join(owners or sorted(kind if "=" in kind else f"study={kind}" for kind in kinds_of_run))


def may_be_added(key: str, kind: str) -> bool:
    """Return whether the key is one that the files of conf leave out: of an own recipe, or of a corpus of that kind."""
    return any(is_at(path, key) and kind_of(cls) in ("", kind) for path, cls, *_ in places() if "NAME" in path)


def is_section(name: str) -> bool:
    """Return whether there are keys below this one."""
    return bool(under(name, places()))


def is_at(path: str, name: str) -> bool:
    """Return whether the path is that name; NAME in it stands for any."""
    return re.fullmatch(re.escape(path).replace("NAME", r"[^.]+"), name) is not None


def under(name: str, every: Iterable[KeyAt]) -> dict[type, list[KeyAt]]:
    """Return the keys directly below a name, by class."""
    found: dict[type, list[KeyAt]] = {}
    for place in every:
        if is_at(place.path.rpartition(".")[0], name):
            found.setdefault(place.cls, []).append(place)
    return found


def indented(text: str, by: int = 2) -> str:
    filled = (
        textwrap.fill(line, WIDTH, initial_indent=" " * by, subsequent_indent=" " * by) for line in text.split("\n")
    )
    return "\n".join(filled)


def of_group(group: str) -> str:
    """Return a group with its choices, and the first paragraph on each."""
    lines = [f"{group}: a group; {group}=CHOICE takes one of"]
    for choice in groups()[group]:
        lines += [f"  {choice}", indented(said_of(group, choice).partition("\n")[0], 6)]
    return "\n".join(lines)


def of_key(place: KeyAt) -> str:
    """Return a key with its type, default, unit and meaning."""
    key = place.key
    facts = {"type": key.type, "default": key.default or NO_DEFAULT, "unit": key.unit, "in": in_words(place)}
    lines = [f"  {name:<9}{fact}" for name, fact in facts.items() if fact]
    return "\n".join([place.path, indented(key.meaning), *lines])


def kind_of(cls: type) -> str:
    """Return the kind that a class of the schema is of, "" if it is of none."""
    return next((key.default for key in keys(cls) if key.name == "kind" and " or " not in key.type), "")


def in_words(place: KeyAt) -> str:
    """Return the kinds of run that have a key, and the kind of its group."""
    kind = kind_of(place.cls)
    return ", ".join(place.kinds) + (f"; of kind {kind}" if kind else "")


def of_section(cls: type, found: Iterable[KeyAt]) -> str:
    """Return all keys of a class, in short."""
    found = [*found]
    head = first_sentence(cls)
    said = head if not any(head.rstrip(".") in place.key.meaning for place in found) else ""
    lines = [f"{found[0].path.rpartition('.')[0]}.*, in {in_words(found[0])}", indented(said)]
    for _, _, key, _ in found:
        default = f"= {key.default}" if key.default else "(no default)"
        lines += [f"  {key.name} {default}", indented(key.meaning, 6)]
    return "\n".join(line for line in lines if line)


# ------------------------------------------------------------------------------------------------ comments in a config


def commented(text: str) -> str:
    """Return a config, as Hydra prints it, with the meaning of each key beside it."""
    lines = text.splitlines()
    paths = dict(walked(lines))
    values = {path: lines[number].partition(": ")[2] for number, path in paths.items()}
    for number, path in paths.items():
        said = PART.split(meaning_at(path, values))[0].rstrip(".;")
        below = lines[number + 1] if number + 1 < len(lines) and number + 1 not in paths else "- "
        if said and below.lstrip().startswith("- "):  # else the value goes on there
            lines[number] += f"  # {said}"
    return "\n".join(lines)


def walked(lines: Iterable[str]) -> Iterator[tuple[int, Path]]:
    """Yield the numbers of the lines that begin a key, with its path; items of a list are left out of the path."""
    above: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        if found := LINE.match(line):
            above = [each for each in above if each[0] < len(found["indent"])]
            above.append((len(found["indent"]), found["key"]))
            yield number, tuple(key for _, key in above)


def meaning_at(path: Path, values: Mapping[Path, str]) -> str:
    """Return the meaning of a key of a config with these values, or "" if the schema has no such key."""
    options: list[type] = [cls for name, cls in STUDIES.items() if name == values.get(("study",))]
    is_name = False  # one of a mapping's
    for number, name in enumerate(path[:-1], start=1):
        if is_name:
            is_name = False
            continue
        hints = [type_hints(cls)[name] for cls in options if name in type_hints(cls)]
        is_name = any("dict" in str(hint) for hint in hints)
        kind = values.get((*path[:number], "kind"))
        inside = [cls for hint in hints for cls in classes(hint)]
        options = [cls for cls in inside if kind is None or kind in get_args(type_hints(cls).get("kind"))]
    known = () if is_name else (key for cls in options for key in keys(cls))
    return next((key.meaning for key in known if key.name == path[-1]), "")
