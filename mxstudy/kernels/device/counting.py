"""E2M1 by counting: under scales 2^k, in rows that are NEAR, no number is divided.

An element's code is how many thresholds its magnitude over the scale reaches: 0.25, 0.75, and 1.25, 2.5, 5 and 1.75,
3.5, which a factor of two parts from each other. In x they are products with rms 2^k, rounded up to bf16, whose
magnitudes compare as their 15 bits do; a factor of two is 128 of those. So a row has four thresholds, a block moves all
by 128 k, and of its binades a number has reached as many as its bits are above the first threshold, over 128.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.codes import divide
from mxstudy.kernels.device.pairs import MAGNITUDES, TWICE, half_bytes, sums_up_to

BINADE = tl.constexpr(128)  # of bf16's bits
WHOLE = tl.constexpr(0x01800180)  # a pair's whole binades, up to three


@triton.jit
def summands(rms, inverse, CAST: tl.constexpr):
    """What bits of magnitudes become counts with, for scales 2^-127: four of int32 pairs, as rms [rows, 1] is."""
    EVEN: tl.constexpr = not CAST.away  # then the ties 0.25, 1.25, 2.5 and 5 are rounded down
    first = threshold(0.25, EVEN, rms, inverse, CAST) - 1
    second = threshold(0.75, False, rms, inverse, CAST) - 1
    lower = threshold(1.25, EVEN, rms, inverse, CAST) - BINADE
    upper = threshold(1.75, False, rms, inverse, CAST) - BINADE
    return less(first), less(second), less(lower), less(upper)


@triton.jit
def less(x):
    """-x twice, if 0 < x < 2^15, and over what a scale 2^-127 has less in its exponent than one of 2^0."""
    return 2**16 - (x - 127 * BINADE) * TWICE


@triton.jit
def threshold(b, ABOVE: tl.constexpr, rms, inverse, CAST: tl.constexpr):
    """bf16's bits of the least x whose quotient is at least b, or ABOVE it: int32."""
    guess = (rms * b).to(tl.int32, bitcast=True) >> 16  # with PRE_ROUND it may be two too small
    AFTER: tl.constexpr = 1 if CAST.pre_round else 0
    found = guess + AFTER + 1
    for i in tl.static_range(-AFTER, AFTER + 1):
        q = divide(((guess + i) << 16).to(tl.float32, bitcast=True), rms, inverse, True, CAST)
        reached = q > b if ABOVE else q >= b
        found -= reached.to(tl.int32)
    return found


@triton.jit
def count_e2m1(word, terms):
    """Codes of a word's two numbers, uint8; `terms`: the summands of their blocks, which broadcast with it."""
    magnitudes = word & MAGNITUDES
    low = sums_up_to(magnitudes, terms[2], 4 * BINADE - 1) & WHOLE
    high = sums_up_to(magnitudes, terms[3], 3 * BINADE - 1)
    first = sums_up_to(magnitudes, terms[0], 1)
    second = sums_up_to(magnitudes, terms[1], 1)
    counts = low + high + (first + second) * BINADE  # and what is less than 1 of one
    return half_bytes(counts * 2, word)
