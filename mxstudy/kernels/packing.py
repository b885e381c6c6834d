"""An operator's options as one argument: torch's operators take numbers and strings, and no dataclasses.

What an operator is told is written down once, as the fields of a frozen dataclass. Its wrapper packs them, and the
reference, the fake and the launch of the kernel unpack them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, TypeVar

from mxstudy.compat.torch_compiler import constant

Options = TypeVar("Options")


def pack(options: Any) -> str:
    """Returns the fields of a frozen dataclass, each a str, int, float, bool or None, in their order: JSON."""
    return _packed(*(getattr(options, field.name) for field in dataclasses.fields(options)))


@constant
def _packed(*values: Any) -> str:
    return json.dumps(values)


@functools.cache
def unpack(cls: type[Options], packed: str) -> Options:
    """Returns the dataclass that `pack` made the string of."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**dict(zip(names, json.loads(packed), strict=True)))
