"""What a backend computes, as a list of values per field: an unlisted value is a reason to refuse, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from mxstudy.config.casts import OPERANDS, TRANSFORMS, Cast, Gemms, Hadamard


@dataclass(frozen=True)
class Implements:
    """The values of each field of a `Cast`, and of a `Hadamard`, that a backend computes.

    For a field that is not listed it computes the default only, which means that the feature is off. A type in a list
    stands for all its values. `transforms`: None if it computes no transform at all. `scales`: for block scales of
    another format, the fields that differ.
    """

    cast: Mapping[str, tuple[Any, ...]]
    transforms: Mapping[str, tuple[Any, ...]] | None = None
    scales: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)

    def why_not(self, gemms: Gemms) -> str | None:
        """Return what of those GEMMs the backend does not compute, with the operand, or None if it computes all."""
        for name, cast in gemms.casts():
            if reason := self.why_not_cast(cast):
                return f"{name}: {reason}"
        for name in TRANSFORMS:
            transform: Hadamard | None = getattr(gemms, name)
            if transform is None:
                continue
            if self.transforms is None:
                return f"{name}: it has no transforms"
            if reason := why_not_fields(transform, {"vector": (transform.vector,), **self.transforms}):
                return f"{name}: {reason}"
        return why_not_fields(gemms, {name: (getattr(gemms, name),) for name in (*OPERANDS, *TRANSFORMS)})

    def why_not_cast(self, cast: Cast) -> str | None:
        """Return a reason for the first field whose value the backend does not compute, or None."""
        return why_not_fields(cast, {**self.cast, **self.scales.get(cast.scale, {})})


def why_not_fields(value: Any, known: Mapping[str, tuple[Any, ...]]) -> str | None:
    """Return a reason for the first field whose value is not in `known` (if not listed: not the default), or None."""
    for one in fields(value):
        given = getattr(value, one.name)
        choices = known.get(one.name, () if one.default is MISSING else (one.default,))
        if not any(type(given) is choice or (type(given) is type(choice) and given == choice) for choice in choices):
            computed = ", ".join(map(str, choices)) or "nothing"
            return f"{one.name} is {given}, and it computes {computed}"
    return None
