"""Run the scripts of analysis/ as commands, from a checkout or from a wheel: figure NAME, report and export."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mxstudy.config.conf_folders import ROOT
from mxstudy.reader import ConfigError, suggest

FOLDER = ROOT / "analysis"  # in a wheel it is inside the package, so that no other top-level name is installed
FIGURE = "figure"
OTHERS = ("report", "export")
COMMANDS = (FIGURE, *OTHERS)
NO_FIGURES = {*OTHERS, "figures"}
FOLDERS = (".", "mxnorm", "instability", "recipe", "fp4", "students")


def names() -> list[str]:
    """Return the scripts that draw a figure or write a table."""
    paths = (path for folder in FOLDERS for path in sorted((FOLDER / folder).glob("*.py")))
    drawing = (path.relative_to(FOLDER) for path in paths if "\n@command\n" in path.read_text())
    found = [path.with_suffix("").as_posix().replace("/", ".") for path in drawing]
    return [name for name in found if name not in NO_FIGURES]


def script(name: str) -> Any:
    """Return the module of that script."""
    package = ModuleType("analysis")
    package.__path__ = [str(FOLDER)]
    sys.modules.setdefault("analysis", package)
    return importlib.import_module(f"analysis.{name}")


def run(words: Sequence[str]) -> None:
    """Run `figure NAME ...`, `report ...` or `export ...`; for `figure` or `figure --help`, print the names.

    Raises ConfigError for another name.
    """
    command, *rest = words
    if command == FIGURE and (not rest or rest[0] in ("-h", "--help")):
        print("\n".join(names()))
        return
    name, arguments = (rest[0], rest[1:]) if command == FIGURE else (command, rest)
    if command == FIGURE and name not in names():
        raise ConfigError(f"figure {name}: no such figure; {suggest(name, names())}")
    sys.argv[0] = f"mxstudy {command}" + (f" {name}" if command == FIGURE else "")
    script(name).main(arguments)
