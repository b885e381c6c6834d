"""The tables of element formats, scale rules and roundings. A new format is a new row of FORMATS."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from mxstudy.config.casts import TRANSFORMS, Cast, Gemms
from mxstudy.reader import ConfigError, suggest

R = TypeVar("R")


@dataclass(frozen=True)
class ElementFormat:
    """A small float and the format of its block scales (OCP MX specification, section 5).

    It has sign, exponent and mantissa bits and keeps subnormals; overflow saturates to `max`.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    scale: Literal["E8M0", "E4M3"] = "E8M0"
    block_size: int = 32  # the default, and the only one of NVFP4

    @property
    def bits(self) -> int:
        """Return the number of bits of an element, its sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def emax(self) -> int:
        """Return the exponent of the largest power of two in the format."""
        return math.frexp(self.max)[1] - 1

    @property
    def emin(self) -> int:
        """Return the exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def min_subnormal(self) -> float:
        """Return the smallest positive number of the format."""
        return 2.0 ** (self.emin - self.mantissa_bits)

    @property
    def binades(self) -> float:
        """Return log2(largest / smallest positive number) (MXFP8 recipe, table 1)."""
        return math.log2(self.max / self.min_subnormal)

    @property
    def has_infinity(self) -> bool:
        """Return whether the top exponent is reserved for infinity and NaN, as in IEEE 754: E5M2 only."""
        return self.emax == 1 - self.emin

    @property
    def max_mantissa(self) -> int:
        """Return the 23 FP32 mantissa bits of `max`."""
        return int((self.max / 2**self.emax - 1) * 2**23)


FORMATS = {
    fmt.name: fmt
    for fmt in (
        ElementFormat("E4M3", exponent_bits=4, mantissa_bits=3, max=448.0),
        ElementFormat("E5M2", exponent_bits=5, mantissa_bits=2, max=57344.0),
        ElementFormat("E3M2", exponent_bits=3, mantissa_bits=2, max=28.0),
        ElementFormat("E2M3", exponent_bits=2, mantissa_bits=3, max=7.5),
        ElementFormat("E2M1", exponent_bits=2, mantissa_bits=1, max=6.0),
        ElementFormat("E1M2", exponent_bits=1, mantissa_bits=2, max=3.5),  # equal steps: four-bit integers over 2
        ElementFormat("NVFP4", exponent_bits=2, mantissa_bits=1, max=6.0, scale="E4M3", block_size=16),
    )
}

# A rule gives an integer to add to the FP32 bits of a block's absmax a. The scale's exponent k is the exponent of that
# sum, minus emax: the addition carries from the mantissa into the exponent exactly where the rule rounds up.
# No logarithm is taken.
SCALE_RULES: dict[str, Callable[[ElementFormat], int]] = {
    "floor": lambda fmt: 0,  # floor(log2 a) - emax: OCP MX specification, section 6.3; saturates above max
    "ceil": lambda fmt: 2**23 - 1,  # ceil(log2 a) - emax: never saturates, wastes up to a binade
    "rceil": lambda fmt: 2**23 - 1 - fmt.max_mantissa,  # ceil(log2(a / max)): MXFP8 recipe, algorithm 1
    "even": lambda fmt: 2 ** (22 - fmt.mantissa_bits),  # floor(log2 r(a)) - emax, r: half up to the element's mantissa
}

# The instability paper's "bump of the exponent", as in its public code; it scales single elements: see `code_bump`.
CODE_BUMP = "code_bump"


BELOW_HALF = 0.5 - 2.0**-25  # largest FP32 number below 0.5; BELOW_HALF + 0.5 would round up to 1


def _half_away(x: Tensor) -> Tensor:
    return torch.trunc(x + torch.copysign(torch.full_like(x, BELOW_HALF), x))


def _stochastic(x: Tensor, u: Tensor) -> Tensor:
    """Round the magnitude up where u is below its fraction: with u uniform in [0, 1) the mean is x."""
    magnitude = x.abs()
    whole = magnitude.floor()
    return torch.copysign(torch.where(u < magnitude - whole, whole + 1, whole), x)


class Rounding(NamedTuple):
    """`apply` maps float32, in steps of the grid, to whole steps; with `draws` it also takes uniform random numbers."""

    apply: Callable[..., Tensor]
    draws: bool = False


ROUNDINGS = {
    "even": Rounding(torch.round),
    "away": Rounding(_half_away),
    "stochastic": Rounding(_stochastic, draws=True),
}


def is_random(cast: Cast) -> bool:
    """Return whether the cast's rounding takes random numbers, as its row of ROUNDINGS says."""
    return look_up(ROUNDINGS, str(cast.rounding), "rounding").draws


def any_random(gemms: Gemms) -> bool:
    """Return whether those GEMMs (filled) take random numbers, for a rounding or for a transform's signs."""
    transforms = (getattr(gemms, name) for name in TRANSFORMS)
    return any(is_random(cast) for _, cast in gemms.casts()) or any(t.is_random for t in transforms if t)


def look_up_mx(name: str) -> ElementFormat:
    """Return the element format of that name. Raises ConfigError for one without E8M0 scales."""
    element = look_up(FORMATS, name, "format")
    if element.scale != "E8M0":
        raise ConfigError(f"format: {name} has {element.scale} scales, not E8M0; take an MX format")
    return element


def look_up(table: Mapping[str, R], name: str, what: str) -> R:
    """Return the table's row of that name. Raises ConfigError, with the nearest name, if there is none."""
    if name not in table:
        raise ConfigError(f"{what}: {name!r} is not a choice; {suggest(name, table)}")
    return table[name]
