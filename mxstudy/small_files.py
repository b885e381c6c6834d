"""Read a run's small JSON and YAML files, name a file that is empty, torn or unreadable in the error, and write YAML.

`remedy` says what to do about it, at the end of the message.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mxstudy.reader import ConfigError, one_line, read, require

T = TypeVar("T")

# libyaml, if PyYAML has it, is ten times as fast.
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ConfigError."""
    return read_with(lambda text: mapping(json.loads(text)), path, remedy)


def read_yaml(path: Path, remedy: str) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError."""
    return read_with(parse_yaml, path, remedy)


def read_as(hint: Any, path: Path, remedy: str) -> Any:
    """Return the content of a JSON file as the type `hint`. Raises ConfigError."""
    return read_with(lambda text: read(hint, json.loads(text), path.name), path, remedy)


def read_if_there(hint: Any, path: Path, remedy: str) -> Any | None:
    """Return the same as `read_as`, or None if there is no such file."""
    try:
        return read_as(hint, path, remedy)
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def parse_yaml(text: str) -> dict[str, Any]:
    """Return the mapping in a YAML text. Raises ConfigError or a YAMLError."""
    return mapping(yaml.load(text, Loader=LOADER))


def mapping(found: Any) -> dict[str, Any]:
    """Return the value if it is a mapping, else raise ConfigError."""
    if not isinstance(found, dict):
        raise ConfigError(f"it holds {found!r:.40}, and must hold a mapping")
    return found


def read_with(parse: Callable[[str], T], path: Path, remedy: str) -> T:
    """Return the result of `parse` on a file's text. Raises ConfigError, also instead of the errors of `parse`."""
    try:
        text = path.read_text(encoding="utf-8")
        require(bool(text.strip()), "it is empty")
        return parse(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ConfigError is a ValueError
        raise ConfigError(f"{path}: cannot be read ({one_line(error)}); {remedy}") from error


def yaml_of(values: dict[str, Any]) -> str:
    """Return a config as YAML; a section that many runs share is written once."""
    return "".join(_yaml_of_section(json.dumps({key: value})) for key, value in values.items())


@functools.lru_cache(1000)
def _yaml_of_section(text: str) -> str:
    return str(yaml.dump(json.loads(text), Dumper=DUMPER, sort_keys=False))
