"""The tables: element formats, scale rules, roundings. A new format is a row of FORMATS."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from mxstudy.reader import ConfigError, suggest

Row = TypeVar("Row")


@dataclass(frozen=True)
class ElementFormat:
    """A small float: sign, exponent, mantissa; subnormals kept; overflow saturates to `max` (OCP MX specification)."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    dtype: torch.dtype  # whose bit patterns are the format's codes

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two in the format."""
        return math.frexp(self.max)[1] - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def max_mantissa(self) -> int:
        """The 23 FP32 mantissa bits of `max`."""
        return int((self.max / 2**self.emax - 1) * 2**23)


FORMATS = {
    fmt.name: fmt
    for fmt in (
        ElementFormat("E4M3", exponent_bits=4, mantissa_bits=3, max=448.0, dtype=torch.float8_e4m3fn),
        ElementFormat("E5M2", exponent_bits=5, mantissa_bits=2, max=57344.0, dtype=torch.float8_e5m2),
    )
}

# The exponent k of a block scale is that of its absmax a, after adding so much to the FP32 bits of a, less emax:
# adding within the mantissa carries into the exponent exactly where the rule rounds up. No logarithm is taken.
SCALE_RULES: dict[str, Callable[[ElementFormat], int]] = {
    "floor": lambda fmt: 0,  # floor(log2 a) - emax: OCP MX specification, section 6.3; saturates above max
    "ceil": lambda fmt: 2**23 - 1,  # ceil(log2 a) - emax: never saturates, wastes up to a binade
    "rceil": lambda fmt: 2**23 - 1 - fmt.max_mantissa,  # ceil(log2(a / max)): MXFP8 recipe, algorithm 1
    "even": lambda fmt: 2 ** (22 - fmt.mantissa_bits),  # floor(log2 r(a)) - emax, r: half up to the element's mantissa
}


def _half_away(x: Tensor) -> Tensor:
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {"even": torch.round, "away": _half_away}


def look_up(table: Mapping[str, Row], name: str, what: str) -> Row:
    """The row of that name; ConfigError with the nearest one where there is none."""
    if name not in table:
        raise ConfigError(f"{what}: {name!r} is not a choice; {suggest(name, table)}")
    return table[name]
