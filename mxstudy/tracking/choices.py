"""Read the values of a group's choice from its YAML file, without Hydra: conf/norm/mxnorm_p2.yaml gives norm.p=2.

The values come from the file itself and from the files of its group in its defaults list. The rest of a group has the
schema's defaults. '${..a.b}', another value of the same file, is looked up.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import yaml

from mxstudy.config.conf_folders import CONF, SWEEPS
from mxstudy.reader import flatten
from mxstudy.small_files import LOADER

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
OF_THE_FILE = re.compile(r"\$\{(\.+)([\w.]+)\}")  # one dot: the mapping that contains the key
NOT_OURS = {"defaults", "hydra"}
GLOBAL = "# @package _global_"


@functools.cache
def given(group: str, choice: str) -> Mapping[str, Any] | None:
    """Return the flat config that a choice's file sets, or None if there is no such file, or none that can be read.

    A '${...}' that refers to anything but another value of the file is left as it is.
    """
    path = (SWEEPS if group == "sweep" else CONF / group) / f"{choice}.yaml"
    if not path.exists():
        return None
    text = path.read_text()
    try:
        content = yaml.load(text, Loader=LOADER) or {}
    except yaml.YAMLError:  # a command that chooses the file is refused; the others need not know it
        return None
    values: dict[str, Any] = {}
    for start in content.get("defaults", []):
        base, _, kind = start.partition("base_") if isinstance(start, str) else ("", "", "")
        if base or not kind:
            values |= given(group, str(start)) or {}
        elif kind != group:  # a group with one kind has a base of the group's name
            values[f"{group}.kind"] = kind
    prefix = "" if text.startswith(GLOBAL) else f"{group}."
    items = flatten({key: value for key, value in content.items() if key not in NOT_OURS})
    return values | {f"{prefix}{key}": number(looked_up(key, items)) for key in items}


def looked_up(key: str, items: Mapping[str, Any]) -> Any:
    """Return the value at a key, or the one that it refers to."""
    value = items[key]
    if not (found := OF_THE_FILE.fullmatch(str(value))):
        return value
    dots, path = found.groups()
    target = ".".join([*key.split(".")[: -len(dots)], path])
    return looked_up(target, items) if target in items else value


@functools.cache
def choices_of(group: str) -> tuple[str, ...]:
    """Return the choices of a group that have a file."""
    return tuple(sorted(path.stem for path in (CONF / group).glob("*.yaml")))


def number(value: Any) -> Any:
    """Return the value as Hydra reads it: 1e-3 is a number, which YAML 1.1 takes for a word."""
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value
