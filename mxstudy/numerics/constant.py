"""Functions whose results are constants of a compiled graph: called while it is traced, and never traced into."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """What torch.compiler.assume_constant_result does, which first imports the compiler: a second, at every start."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
