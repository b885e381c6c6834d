"""List the columns of a run's config that cannot change its numbers, so that they are not in its fingerprint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

from mxstudy.config import STUDIES
from mxstudy.reader import type_hints


def cosmetic_columns(study: str) -> tuple[str, ...]:
    """Return the cosmetic columns of a study's runs; a column stands for all columns below it."""
    return tuple(dict.fromkeys(f"config.{key}" for key in _keys(STUDIES[study])))


def _keys(hint: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of the cosmetic fields of a dataclass, or of each dataclass in a union."""
    options: list[Any] = [each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)]
    for option in options:
        for field in dataclasses.fields(option):
            if field.metadata.get("cosmetic"):
                yield f"{prefix}{field.name}"
            else:
                yield from _keys(type_hints(option)[field.name], f"{prefix}{field.name}.")
