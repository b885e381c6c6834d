"""Kinds of run, imported one by one: what all of them need takes seconds to import, and a sweep is of one or two."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class Kinds(dict[str, ModuleType]):
    """The module of each kind of run, by its name in that package; here are those that were asked for."""

    def __init__(self, package: str) -> None:
        self.package = package

    def __missing__(self, kind: str) -> ModuleType:
        self[kind] = import_module(f"{self.package}.{kind}")
        return self[kind]
