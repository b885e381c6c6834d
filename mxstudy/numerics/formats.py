"""The tables: element formats, scale rules, roundings. A new format is a row of FORMATS."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from mxstudy.config.casts import TRANSFORMS, Cast, Gemms
from mxstudy.reader import ConfigError, suggest

Row = TypeVar("Row")


@dataclass(frozen=True)
class ElementFormat:
    """A small float and the format of its block scales (OCP MX specification, section 5).

    Sign, exponent, mantissa; subnormals kept; overflow saturates to `max`.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    scale: Literal["E8M0", "E4M3"] = "E8M0"
    block_size: int = 32  # the default; the only one of NVFP4

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def emax(self) -> int:
        """Exponent of the largest power of two in the format."""
        return math.frexp(self.max)[1] - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def min_subnormal(self) -> float:
        return 2.0 ** (self.emin - self.mantissa_bits)

    @property
    def binades(self) -> float:
        """log2 of the largest over the smallest positive number (MXFP8 recipe, table 1)."""
        return math.log2(self.max / self.min_subnormal)

    @property
    def has_infinity(self) -> bool:
        """Whether the largest exponent is kept for infinity and NaN, as IEEE 754 does: E5M2 alone."""
        return self.emax == 1 - self.emin

    @property
    def max_mantissa(self) -> int:
        """The 23 FP32 mantissa bits of `max`."""
        return int((self.max / 2**self.emax - 1) * 2**23)


FORMATS = {
    fmt.name: fmt
    for fmt in (
        ElementFormat("E4M3", exponent_bits=4, mantissa_bits=3, max=448.0),
        ElementFormat("E5M2", exponent_bits=5, mantissa_bits=2, max=57344.0),
        ElementFormat("E3M2", exponent_bits=3, mantissa_bits=2, max=28.0),
        ElementFormat("E2M3", exponent_bits=2, mantissa_bits=3, max=7.5),
        ElementFormat("E2M1", exponent_bits=2, mantissa_bits=1, max=6.0),
        ElementFormat("NVFP4", exponent_bits=2, mantissa_bits=1, max=6.0, scale="E4M3", block_size=16),
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

# The instability paper's "bump of the exponent" as its public code has it, which is no rule of blocks: see `code_bump`.
CODE_BUMP = "code_bump"


BELOW_HALF = 0.5 - 2.0**-25  # in FP32; 0.5 itself would round the sum of both up to 1


def _half_away(x: Tensor) -> Tensor:
    return torch.trunc(x + torch.copysign(torch.full_like(x, BELOW_HALF), x))


def _stochastic(x: Tensor, u: Tensor) -> Tensor:
    """Round the magnitude up where u, uniform in [0, 1), is below its fraction: x in the mean."""
    magnitude = x.abs()
    whole = magnitude.floor()
    return torch.copysign(torch.where(u < magnitude - whole, whole + 1, whole), x)


class Rounding(NamedTuple):
    """`apply` maps float32, in steps of the grid, to whole steps; one that `draws` takes uniform numbers as well."""

    apply: Callable[..., Tensor]
    draws: bool = False


ROUNDINGS = {
    "even": Rounding(torch.round),
    "away": Rounding(_half_away),
    "stochastic": Rounding(_stochastic, draws=True),
}


def is_random(cast: Cast) -> bool:
    """Whether the cast's rounding takes random numbers, as its row of ROUNDINGS says."""
    return look_up(ROUNDINGS, str(cast.rounding), "rounding").draws


def any_random(gemms: Gemms) -> bool:
    """Whether those GEMMs, which are filled, take random numbers: for a rounding, or for signs."""
    transforms = (getattr(gemms, name) for name in TRANSFORMS)
    return any(is_random(cast) for _, cast in gemms.casts()) or any(t.is_random for t in transforms if t)


def look_up_mx(name: str) -> ElementFormat:
    """The element format of that name; ConfigError for one without E8M0 scales."""
    element = look_up(FORMATS, name, "format")
    if element.scale != "E8M0":
        raise ConfigError(f"format: {name} has {element.scale} scales, not E8M0; take an MX format")
    return element


def look_up(table: Mapping[str, Row], name: str, what: str) -> Row:
    """The row of that name; ConfigError with the nearest one where there is none."""
    if name not in table:
        raise ConfigError(f"{what}: {name!r} is not a choice; {suggest(name, table)}")
    return table[name]
