"""An operator's options as one string: torch's operators take numbers and strings, but no dataclasses.

The options are declared once, as the fields of a frozen dataclass. The operator's wrapper packs them, and its
reference, its fake and the launch of its kernel unpack them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, TypeVar

from mxstudy.compat.torch_compiler import constant

Options = TypeVar("Options")


def pack(options: Any) -> str:
    """Return the fields of a frozen dataclass as JSON, in order: str, int, float, bool, None or a tuple of them."""
    return json.dumps([getattr(options, field.name) for field in dataclasses.fields(options) if field.init])


@constant
def pack_fields(cls: type, *values: Any) -> str:
    """Return `pack(cls(*values))`. A compiled graph has the string as a constant: nothing here is traced."""
    return pack(cls(*values))


@functools.cache
def unpack(cls: type[Options], packed: str) -> Options:
    """Return the dataclass `cls` from a string that `pack` made of one."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    values = [tuple(value) if isinstance(value, list) else value for value in json.loads(packed)]
    return cls(**dict(zip(names, values, strict=True)))
