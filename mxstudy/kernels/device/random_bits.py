"""Random words and rounding by them in a program: `mxstudy.numerics.random_bits` on the device, same bits.

FORMAT is a `FormatConstants` of mxstudy.kernels.operators.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import EXPONENT_MASK, SIGN_MASK


@triton.jit
def philox(column, row, step, k0, k1):
    """Return the words of the counters (column, row, step, 0), as `random_bits.philox` does, with 64-bit products."""
    c0 = column.to(tl.uint32)
    c1 = row.to(tl.uint32)
    c2 = step
    c3 = tl.zeros_like(c1)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p2 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p2 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p2.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def round_stochastically(v, word, FORMAT: tl.constexpr, BITS: tl.constexpr):
    """Round v float32 to the element value above it in magnitude where u < f, else to the one below: the same bits.

    f is the fraction of a step; with fewer than 24 BITS it is rounded down to that many, so that the condition is
    u + 1 unit <= f. Units are 2^-BITS of the grid's step at |v|, so u is an integer. The step below is |v|
    minus half a step, rounded to steps; if it comes out a whole step too low, then u < f for every u. Garbage for a NaN
    or an infinity, whose block's scale is NaN.
    """
    MANTISSA: tl.constexpr = FORMAT.mantissa_bits
    STEP: tl.constexpr = 2.0**BITS
    ANCHOR: tl.constexpr = 3.0 * 2.0 ** (22 + BITS)  # floats of this size are one step apart: adding it rounds
    magnitude = tl.abs(v)
    if FORMAT.limit is not None:
        magnitude = tl.minimum(magnitude, FORMAT.limit)
    binade = tl.maximum(magnitude.to(tl.int32, bitcast=True) & EXPONENT_MASK, FORMAT.least_normal)
    per_binade = ((127 << 23) - binade) + ((127 + MANTISSA + BITS) << 23)
    units = magnitude * per_binade.to(tl.float32, bitcast=True)
    below = ((units - 0.5 * STEP) + ANCHOR) - ANCHOR
    u = (word >> (32 - BITS)).to(tl.int32).to(tl.float32)
    up = u < units - below if BITS == 24 else u + 1 <= units - below
    rounded = tl.where(up, below + STEP, below)
    value = rounded * (binade - ((MANTISSA + BITS) << 23)).to(tl.float32, bitcast=True)
    sign = v.to(tl.int32, bitcast=True) & SIGN_MASK
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
