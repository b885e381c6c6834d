"""E2M1 codes by counting: under scales 2^k, in rows that are NEAR, no number is divided.

An element's code is the number of thresholds that its magnitude over the scale reaches: 0.25, 0.75, and two series in
which each is twice the one before: 1.25, 2.5, 5 and 1.75, 3.5. In terms of x they are products with rms 2^k, rounded up
to bf16; bf16 magnitudes compare as their 15 bits do, and a factor of two is 128 of those. So a row has four thresholds,
and a block shifts them all by 128 k. Of a series, a number has reached (its bits - the first threshold's) / 128,
rounded down, plus 1.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.codes import divide
from mxstudy.kernels.device.pairs import MAGNITUDES, TWICE, half_bytes, sums_up_to

BINADE = tl.constexpr(128)  # bf16 bit patterns per binade
WHOLE = tl.constexpr(0x01800180)  # mask of a pair's whole binades, up to three


@triton.jit
def addends(rms, inverse, CAST: tl.constexpr):
    """Return four addends that turn magnitude bits into threshold counts at scale 2^-127: int32 pairs [rows, 1]."""
    EVEN: tl.constexpr = not CAST.away  # then the ties 0.25, 1.25, 2.5 and 5 are rounded down
    first = threshold(0.25, EVEN, rms, inverse, CAST) - 1
    second = threshold(0.75, False, rms, inverse, CAST) - 1
    lower = threshold(1.25, EVEN, rms, inverse, CAST) - BINADE
    upper = threshold(1.75, False, rms, inverse, CAST) - BINADE
    return less(first), less(second), less(lower), less(upper)


@triton.jit
def less(x):
    """Return 127 * 128 - x for both halves of a pair: move a bound 0 < x < 2^15 from scale 2^0 to 2^-127."""
    return 2**16 - (x - 127 * BINADE) * TWICE


@triton.jit
def threshold(b, ABOVE: tl.constexpr, rms, inverse, CAST: tl.constexpr):
    """Return bf16's bits, int32, of the least x whose quotient is at least b, or greater than b if ABOVE."""
    guess = (rms * b).to(tl.int32, bitcast=True) >> 16  # with pre-rounding it may be two too small
    AFTER: tl.constexpr = 1 if CAST.pre_round else 0
    found = guess + AFTER + 1
    for i in tl.static_range(-AFTER, AFTER + 1):
        q = divide(((guess + i) << 16).to(tl.float32, bitcast=True), rms, inverse, True, CAST)
        reached = q > b if ABOVE else q >= b
        found -= reached.to(tl.int32)
    return found


@triton.jit
def count_e2m1(word, terms):
    """Return the uint8 codes of a word's two numbers. `terms`: their blocks' addends, broadcast with the word."""
    magnitudes = word & MAGNITUDES
    low = sums_up_to(magnitudes, terms[2], 4 * BINADE - 1) & WHOLE
    high = sums_up_to(magnitudes, terms[3], 3 * BINADE - 1)
    first = sums_up_to(magnitudes, terms[0], 1)
    second = sums_up_to(magnitudes, terms[1], 1)
    counts = low + high + (first + second) * BINADE  # plus a remainder of less than one, from `high`
    return half_bytes(counts * 2, word)
