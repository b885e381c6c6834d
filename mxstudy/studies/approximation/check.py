"""Measuring what MXNorm approximates can always be done."""

from __future__ import annotations

from typing import Any

from mxstudy.config import Approximation


def check(config: Approximation) -> None:
    """Nothing beyond what the schema has checked."""


def identity_key(config: Approximation) -> Any:
    return None


def identity(config: Approximation) -> tuple[str, dict[str, Any]]:
    """Always on the CPU, and no corpus."""
    return "cpu", {}
