"""Find a model's modules of one class."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Kind = TypeVar("Kind")


def modules_of(model: nn.Module, kind: type[Kind]) -> dict[str, Kind]:
    """Return {name: module} of all modules of that class, in the order in which they are registered."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}
