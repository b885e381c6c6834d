"""Compute every value of a `Cast` from its definition, in Python floats, one number after another.

Each operation is one of float64 whose result is rounded to float32, which for +, -, *, / and roots of float32 numbers
is what float32 arithmetic gives. Exponents of E8M0 scales are those of reference.py, in exact fractions.

    a = range of the block * float32(candidate's factor)
    E8M0  k of a by the rule; elements x / 2^k * headroom; decoded: element * (2^k * (1 / headroom))
    E4M3  s = a / (max * headroom) / outer, at least 2^-6, to E4M3; elements x * (1 / outer / s); element * (s * outer)
          or, the training chain, with S = (max * headroom * L) / A of the absmax A of all, at most FLT_MAX, 1 for 0:
          s = a * (S * (1 / (max * headroom))) to E4M3, subnormals and 0 too; elements x * min(1 / (s * (1 / S)),
          FLT_MAX); element * (s * outer)
    FP32  s = a / (max * headroom), at least 2^-126; elements x / s
    none  elements x / outer

The outer scale is absmax / (max * headroom * L) over E4M3 scales, L = 448 but for four over six, at least 2^-120 (not
so in the training chain), and absmax / (max * headroom), at least 2^-126, where it is the only one. Quotients by such
constants are products in float64 with 1 / constant.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_float
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from reference import ELEMENTS, Array, Element, round_to, scale_exponent

from mxstudy.config.casts import Cast

Lines = list[list[float]]  # the numbers of a block, in one line or B lines
Place = tuple[int, int] | None  # None: a zero that fills up the block
E4M3 = ELEMENTS["E4M3"]
FLT_MAX = float.fromhex("0x1.fffffep127")
NAN_CODE = 255


class Draws(NamedTuple):
    """A stream's name with its seed, and the step and place in the training."""

    seed: int
    name: str
    step: int
    first_row: int


class Outcome(NamedTuple):
    """The result of a cast.

    `scales` are E8M0 codes, or the values of other scales. `outer` is one more factor of the decoding, None for 1.
    """

    values: Array
    scales: Array
    outer: Array | None
    inside: NDArray[np.bool_]
    decoded: Array


def f32(x: float) -> float:
    return c_float(x).value


def element_of(cast: Cast) -> Element:
    return ELEMENTS[cast.format.replace("NVFP4", "E2M1")]


# -------------------------------------------------------------------------------------------------------- what is drawn


def philox(counter: Sequence[int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return Philox4x32-10 as its paper defines it (Salmon et al., SC 2011, section 3.3 and table 2)."""
    r0, l0, r1, l1 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = r0 * 0xD2511F53, r1 * 0xCD9E8D57
        r0, l0, r1, l1 = (p1 >> 32) ^ l0 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ l1 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return r0, l0, r1, l1


def key_of(draws: Draws) -> tuple[int, int]:
    digest = hashlib.sha256(f"{draws.seed}:{draws.name}".encode()).hexdigest()
    return int(digest[:8], 16), int(digest[8:16], 16)


@functools.cache
def fractions_drawn(draws: Draws, rows: int, columns: int, bits: int) -> Lines:
    """Return the least fraction of a step that rounds up, of each element.

    It is the upper bits of word column % 4 of the counter (column // 4, global row, step, 0).
    """
    key, found = key_of(draws), []
    for row in range(rows):
        groups = ((c, (draws.first_row + row) % 2**32, draws.step % 2**32, 0) for c in range(-(-columns // 4)))
        words = itertools.chain.from_iterable(philox(counter, key) for counter in groups)
        found.append([least_that_rounds_up(word >> (32 - bits), bits) for word in itertools.islice(words, columns)])
    return found


def least_that_rounds_up(number: int, bits: int) -> float:
    """Return the least fraction that rounds up: that above number / 2^24; with fewer bits (number + 1) / 2^bits."""
    return math.nextafter(number / 2**bits, 1) if bits == 24 else (number + 1) / 2**bits


def signs_drawn(draws: Draws, size: int) -> Array:
    key = key_of(draws)
    words = [philox((i // 4, draws.first_row, draws.step, 1), key)[i % 4] for i in range(size)]
    return np.array([-1.0 if word >= 2**31 else 1.0 for word in words])


# ----------------------------------------------------------------------------------------------------------- one number


def to_grid(x: float, element: Element, rounding: str, u: float = math.nan) -> float:
    """Return x on the element grid, saturated.

    `stochastic` rounds up where the part of a step that x lies above the grid is at least u.
    """
    magnitude = min(abs(x), element.max)
    if math.isnan(x) or magnitude == 0:
        return x
    step = max(math.frexp(magnitude)[1] - 1, element.emin) - element.mantissa_bits
    steps = math.ldexp(magnitude, -step)
    whole = math.floor(steps)
    left = steps - whole
    if rounding == "stochastic":
        up = left >= u
    elif rounding == "even":
        up = left > 0.5 or (left == 0.5 and whole % 2 == 1)
    else:
        assert rounding == "away"
        up = left >= 0.5
    return math.copysign(math.ldexp(whole + up, step), x)


def sums(numbers: Sequence[float]) -> float:
    """Sum by halves, the first half plus the second, and keep an odd number for the next round."""
    found = list(numbers)
    while len(found) > 1:
        half = len(found) // 2
        pairs = zip(found[:half], found[half:], strict=False)
        found = [f32(a + b) for a, b in pairs] + found[2 * half :]
    return found[0]


def sum_of_block(lines: Lines) -> float:
    """Sum each column of a square block, then those sums."""
    return sums([sums(column) for column in zip(*lines, strict=True)] if len(lines) > 1 else lines[0])


def quotient(absmax: float, constant: float, least: float) -> float:
    """Return absmax / constant in float32, at least `least`, or NaN where absmax is not finite."""
    return max(f32(absmax * (1 / constant)), least) if math.isfinite(absmax) else math.nan


def largest(numbers: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, numbers)) else max(map(abs, numbers), default=0.0)


# ------------------------------------------------------------------------------------------------------------ one block


def range_of(lines: Lines, cast: Cast, element: Element) -> float:
    """Return the absmax, or what a scale makes of a deviation sd: ((2.92247856 / max) * sd + 1e-8) times its range.

    The range is 2^emax with E8M0 scales, so that rule floor gives Quartet's 2^floor(log2(...)), and max with others.
    The result is NaN if a sum of squares is not finite.
    """
    flat = [x for line in lines for x in line]
    if cast.statistic == "absmax":
        return largest(flat)
    squares = [[f32(x * x) for x in line] for line in lines]
    mean, square = (f32(sum_of_block(of) * f32(1 / len(flat))) for of in (lines, squares))
    if not math.isfinite(square):
        return math.nan
    deviation = f32(math.sqrt(max(f32(square - f32(mean * mean)), 0.0)))
    scale = f32(f32(f32(2.92247856 / element.max) * deviation) + f32(1e-8))
    return f32(scale * (2.0**element.emax if cast.scale == "E8M0" else element.max))


Scaled = tuple[float, float, Callable[[float], float]]  # the stored scale, the factor that decodes, x over its scale


def scale_of(a: float, above: float, cast: Cast, element: Element) -> Scaled:
    reach = element.max * cast.headroom
    if cast.scale == "E8M0":
        if not math.isfinite(a):
            return NAN_CODE, math.nan, lambda x: math.nan
        k = scale_exponent(a, element, str(cast.scale_rule))
        headroom, inverse = f32(cast.headroom), f32(1 / cast.headroom)
        return k + 127, f32(2.0**k * inverse), lambda x: f32(f32(math.ldexp(x, -k)) * headroom)
    if cast.chain == "training":
        return training_scale(a, above, reach, cast.largest_scale)
    if cast.scale == "E4M3":
        scale = to_grid(max(f32(quotient(a, reach, 0.0) / above), 2.0**-6), E4M3, "even")
        scale = scale if math.isfinite(a) and not math.isnan(above) else math.nan
        factor = f32(f32(1 / above) / scale)
        return scale, f32(scale * above), lambda x: f32(x * factor)
    if cast.scale == "FP32":
        scale = quotient(a, reach, 2.0**-126)
        return scale, scale, lambda x: f32(x / scale)
    return 1.0, above, lambda x: f32(x / above)


def training_scale(a: float, above: float, reach: float, most: float) -> Scaled:
    """Return the scale in Transformer Engine's order. `above` is the absmax of all blocks together."""
    if not (math.isfinite(a) and math.isfinite(above)):
        return math.nan, math.nan, lambda x: math.nan
    encode = min(f32(f32(reach * most) / above), FLT_MAX) if above else 1.0
    scale = to_grid(f32(a * f32(encode * f32(1 / reach))), E4M3, "even")
    product = f32(scale * f32(1 / encode))
    factor = min(f32(1 / product), FLT_MAX) if product else FLT_MAX
    return scale, f32(scale * quotient(above, reach * most, 0.0)), lambda x: f32(x * factor)


class Block(NamedTuple):
    scale: float
    values: Lines
    inside: list[list[bool]]
    decoded: Lines
    error: float


def cast_block(lines: Lines, us: Lines, above: float, cast: Cast) -> Block:
    """Return the candidate with the least error, the first of equal ones."""
    element, best = element_of(cast), None
    a = range_of(lines, cast, element)
    for factor in cast.candidates:
        scale, decodes, divided = scale_of(f32(a * f32(factor)), above, cast, element)
        scaled = [[divided(x) for x in line] for line in lines]
        values = [
            [to_grid(x, element, str(cast.rounding), u) for x, u in zip(*pair, strict=True)]
            for pair in zip(scaled, us, strict=True)
        ]
        inside = [[abs(x) <= element.max for x in line] for line in scaled]
        decoded = [[f32(value * decodes) for value in line] for line in values]
        error = error_of(lines, decoded, cast) if len(cast.candidates) > 1 else 0.0
        if best is None or error < best.error or math.isnan(best.error):
            best = Block(scale, values, inside, decoded, error)
    assert best is not None
    return best


def error_of(lines: Lines, decoded: Lines, cast: Cast) -> float:
    differences = [[f32(y - x) for x, y in zip(*pair, strict=True)] for pair in zip(lines, decoded, strict=True)]
    is_square = cast.candidate_error == "mse"
    return sum_of_block([[f32(e * e) if is_square else abs(e) for e in line] for line in differences])


# ------------------------------------------------------------------------------------------------------------ all of it


def blocks_of(shape: tuple[int, int], cast: Cast, axis: int) -> Iterator[tuple[tuple[int, int], list[list[Place]]]]:
    """Yield the place of each block's scale, and those of its numbers, along the contraction axis."""
    rows, columns = shape
    size = cast.block_size or shape[axis]
    starts = [range(0, n, size) for n in shape]

    def place(row: int, column: int) -> Place:
        if row < rows and column < columns:
            return row, column
        assert cast.pad, "no whole blocks"
        return None

    if cast.two_dimensional:
        for i, j in itertools.product(*starts):
            yield (
                (i // size, j // size),
                [[place(row, column) for column in range(j, j + size)] for row in range(i, i + size)],
            )
    elif axis == 1:
        for row, j in itertools.product(range(rows), starts[1]):
            yield (row, j // size), [[place(row, column) for column in range(j, j + size)]]
    else:
        for i, column in itertools.product(starts[0], range(columns)):
            yield (i // size, column), [[place(row, column) for row in range(i, i + size)]]


def outer_scale(x: NDArray[np.float32], cast: Cast, axis: int, bound: float | None = None) -> Array | None:
    """Return the float32 values of the scale above the blocks, 0-dim or one per row of the operand, or None.

    For the training chain it is the absmax, from which a block makes both of its factors.
    """
    if cast.outer_scale == "none":
        return None
    reach = element_of(cast).max * cast.headroom
    constant, least = (reach * cast.largest_scale, 2.0**-120) if cast.scale == "E4M3" else (reach, 2.0**-126)
    constant, least = (1.0, 0.0) if cast.chain == "training" else (constant, least)
    if cast.outer_scale == "bound" and bound is not None:
        return np.array(quotient(bound, constant, least))
    x = pre_rounded(x, cast)
    if cast.outer_scale == "tensor":
        return np.array(quotient(largest(x.ravel().tolist()), constant, least))
    lines = x.tolist() if axis % 2 else x.T.tolist()
    return np.expand_dims([quotient(largest(line), constant, least) for line in lines], axis % 2)


def pre_rounded(x: NDArray[np.float32], cast: Cast) -> NDArray[np.float32]:
    """Return x rounded to 8 bits of mantissa, halves away from zero, with unchanged exponents."""
    if not cast.pre_round:
        return x
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = round_to(np.where(np.isfinite(wide), wide, 0.0), Element(8, 7, math.inf), "away")
        return np.where(np.isfinite(wide), rounded, wide).astype(np.float32)


def cast_array(
    x: NDArray[np.float32], cast: Cast, axis: int, outer: Array | None = None, draws: Draws | None = None
) -> Outcome:
    """Cast x [rows, columns] by a filled cast. `outer` is given, or is that of the whole tensor."""
    axis %= 2
    if cast.outer_scale != "none" and outer is None:
        outer = outer_scale(x, Cast(**(vars(cast) | {"outer_scale": "tensor"})), axis)
    numbers = pre_rounded(x, cast).tolist()
    us = fractions_drawn(draws, *x.shape, cast.random_bits) if draws else None
    found = dict(blocks_of(x.shape, cast, axis))
    shape = tuple(1 + max(place[i] for place in found) for i in (0, 1))
    top = element_of(cast).max * cast.headroom * cast.largest_scale
    alone = top if cast.chain == "training" else 1.0
    above = np.broadcast_to(alone if outer is None else outer, shape)
    values, decoded, scales = np.full(x.shape, np.nan), np.full(x.shape, np.nan), np.full(shape, np.nan)
    inside = np.zeros(x.shape, bool)
    for at, places in found.items():
        lines = [[numbers[p[0]][p[1]] if p else 0.0 for p in line] for line in places]
        lots = [[us[p[0]][p[1]] if us and p else math.nan for p in line] for line in places]
        block = cast_block(lines, lots, float(above[at]), cast)
        scales[at] = block.scale
        for line, *parts in zip(places, block.values, block.inside, block.decoded, strict=True):
            for p, value, fits, y in zip(line, *parts, strict=True):
                if p:
                    values[p], inside[p], decoded[p] = value, fits, y
    if cast.scale == "E8M0" and cast.headroom < 1:
        outer = np.array(f32(1 / cast.headroom))
    if cast.chain == "training" and outer is not None:
        outer = np.vectorize(lambda absmax: quotient(absmax, top, 0.0))(outer)
    return Outcome(values, scales, outer, inside, decoded)
