"""What a backend computes, as a list of values per field: an unlisted value is a reason to refuse, never ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from mxstudy.config.casts import OPERANDS, TRANSFORMS, Cast, Gemms, Hadamard
from mxstudy.config.settings import written


@dataclass(frozen=True)
class Implements:
    """The values of each field of a `Cast`, and of a `Hadamard`, that a backend computes.

    For a field that is not listed it computes the default only, which means that the feature is off. A type in a list
    stands for all its values. `name`: what computes them, in the plural. `transforms`: None if it computes no transform
    at all. `scales`: for block scales of another format, the fields that differ.
    """

    name: str
    cast: Mapping[str, tuple[Any, ...]]
    transforms: Mapping[str, tuple[Any, ...]] | None = None
    scales: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)

    def why_not(self, gemms: Gemms) -> str | None:
        """Return a sentence with the first setting of those GEMMs that the backend lacks, or None if it lacks none."""
        lacked = next(self.lacked(gemms), None)
        return lacked and f"{self.name} do not support {lacked}"

    def lacked(self, gemms: Gemms) -> Iterator[str]:
        """Yield every setting of those GEMMs that the backend lacks, and the values that it has."""
        for name, cast in gemms.casts():
            yield from (f"{name}.{setting}" for setting in self.lacked_in(cast))
        for name in TRANSFORMS:
            transform: Hadamard | None = getattr(gemms, name)
            if transform is None:
                continue
            if self.transforms is None:
                yield name
            else:
                known = {"vector": (transform.vector,), **self.transforms}
                yield from (f"{name}.{setting}" for setting in unlisted(transform, known))
        yield from unlisted(gemms, {name: (getattr(gemms, name),) for name in (*OPERANDS, *TRANSFORMS)})

    def lacked_in(self, cast: Cast) -> Iterator[str]:
        """Yield every setting of a cast that the backend lacks, and the values that it has."""
        return unlisted(cast, {**self.cast, **self.scales.get(cast.scale, {})})


def unlisted(value: Any, known: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Yield every field whose value is not in `known` (if not listed: not the default): 'rounding=down, only even'."""
    for one in fields(value):
        given = getattr(value, one.name)
        choices = known.get(one.name, () if one.default is MISSING else (one.default,))
        if not any(type(given) is choice or (type(given) is type(choice) and given == choice) for choice in choices):
            others = f", only {' or '.join(map(written, choices))}" if choices else ""
            yield f"{one.name}={written(given)}{others}"
