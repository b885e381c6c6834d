"""Make blocks on which casts go wrong, as float32 numpy arrays [blocks, block_size]."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from reference import ELEMENTS, Element

Blocks = NDArray[np.float32]
Generator = np.random.Generator


def from_bits(bits: NDArray[np.uint32]) -> Blocks:
    return bits.astype(np.uint32).view(np.float32)


def any_exponent(rng: Generator, shape: tuple[int, int]) -> Blocks:
    """Draw sign, exponent (all but that of Inf and NaN) and mantissa apart: 250 binades in one block."""
    fields = rng.integers(0, [2, 255, 2**23], (*shape, 3))
    return from_bits(fields[..., 0] << 31 | fields[..., 1] << 23 | fields[..., 2])


def one_binade_per_block(rng: Generator, shape: tuple[int, int]) -> Blocks:
    """Return blocks all over the exponent range, each spread over 16 binades, so that few elements round to zero."""
    top = rng.integers(0, 255, (shape[0], 1))
    exponent = np.clip(top - rng.integers(0, 16, shape), 0, 254)
    return from_bits(rng.integers(0, 2, shape) << 31 | exponent << 23 | rng.integers(0, 2**23, shape))


def gaussian(rng: Generator, shape: tuple[int, int]) -> Blocks:
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, (shape[0], 1))).astype(np.float32)


def subnormal(rng: Generator, shape: tuple[int, int]) -> Blocks:
    return from_bits(rng.integers(0, 2, shape) << 31 | rng.integers(0, 2**23, shape))


def barely_normal(rng: Generator, shape: tuple[int, int]) -> Blocks:
    """Return numbers around 2^-127 * max, where k reaches its lower clamp."""
    exponent = rng.integers(1, 24, (shape[0], 1)) - rng.integers(0, 4, shape)
    return from_bits(np.clip(exponent, 0, 254) << 23 | rng.integers(0, 2**23, shape))


def huge(rng: Generator, shape: tuple[int, int]) -> Blocks:
    """Return numbers up to the largest float32, which every block has."""
    blocks = from_bits(
        rng.integers(0, 2, shape) << 31 | rng.integers(252, 255, shape) << 23 | rng.integers(0, 2**23, shape)
    )
    blocks[:, 0] = np.finfo(np.float32).max
    return blocks


def zero(rng: Generator, shape: tuple[int, int]) -> Blocks:
    return np.copysign(np.float32(0), rng.standard_normal(shape)).astype(np.float32)


def ties(rng: Generator, shape: tuple[int, int], element: Element) -> Blocks:
    """Return midpoints of neighbours on the element's grid, subnormals among them, under a power of two as maximum."""
    steps = rng.integers(0, 2 ** (element.mantissa_bits + 1), shape) + 0.5
    exponent = rng.integers(element.emin, max(element.emax, element.emin + 1), shape) - element.mantissa_bits
    blocks = np.ldexp(steps, exponent) * rng.choice([-1, 1], shape)
    blocks[:, -1] = 2.0**element.emax
    return np.ldexp(blocks, rng.integers(-100, 100, (shape[0], 1))).astype(np.float32)


def near(maximum: float) -> Callable[[Generator, tuple[int, int]], Blocks]:
    """Return a maker of blocks whose largest magnitude is maximum * 2^k, or a few units in the last place beside it."""

    def make(rng: Generator, shape: tuple[int, int]) -> Blocks:
        top = np.ldexp(np.float32(maximum), rng.integers(-118, 126, shape[0])).astype(np.float32)
        beside = np.resize(np.array([0, 1, -1, 2, -2, 40, -40]), shape[0])
        top = from_bits((top.view(np.uint32).astype(np.int64) + beside).astype(np.uint32))
        blocks = (rng.uniform(-1, 1, shape) * top[:, None]).astype(np.float32)
        blocks[np.arange(shape[0]), rng.integers(0, shape[1], shape[0])] = top * rng.choice([-1, 1], shape[0])
        return blocks

    return make


def with_nan_or_inf(rng: Generator, shape: tuple[int, int]) -> Blocks:
    """Return blocks of which every other one holds one of them or all."""
    blocks = gaussian(rng, shape)
    for i, bad in enumerate([[np.nan], [np.inf], [-np.inf], [np.inf, np.nan], [-np.inf] * shape[1]]):
        if 2 * i < shape[0]:
            blocks[2 * i, : len(bad)] = bad
    return blocks


KINDS: dict[str, Callable[[Generator, tuple[int, int]], Blocks]] = {
    "any_exponent": any_exponent,
    "one_binade_per_block": one_binade_per_block,
    "gaussian": gaussian,
    "subnormal": subnormal,
    "barely_normal": barely_normal,
    "huge": huge,
    "zero": zero,
    "near_power_of_two": near(1.0),
    "near_1.5": near(1.5),  # the largest mantissa of E2M1: rceil and floor differ here
    "near_1.75": near(1.75),  # that of E4M3, E5M2 and E3M2; where `even` rounds up E2M1's maximum
    "near_1.875": near(1.875),  # that of E2M3; where `even` rounds up E5M2's and E3M2's maximum
    "near_1.9375": near(1.9375),  # and E4M3's and E2M3's
    "with_nan_or_inf": with_nan_or_inf,
}


def every_kind(fmt: str, block_size: int, per_kind: int, seed: int = 0) -> Blocks:
    """Return all kinds above and the ties of `fmt`: [(len(KINDS) + 1) * per_kind, block_size]."""
    rng = np.random.default_rng(seed)
    shape = (per_kind, block_size)
    return np.concatenate([make(rng, shape) for make in KINDS.values()] + [ties(rng, shape, ELEMENTS[fmt])])
