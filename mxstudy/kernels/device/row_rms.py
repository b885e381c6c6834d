"""The RMS of rows held in chunks, in one exchange between a program's threads, because waiting is what costs here.

A chunk is two vectors of words [rows, spans, words]. `maxima`: the bits, as of a float32, of the blocks' largest
magnitudes, int32 [rows, blocks]. NORM is a `NormConstants`, SHAPE a `Shape`, as in `norm_codes`.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.codes import FAR, FARTHEST
from mxstudy.kernels.device.norm_cast import finish_block_maxima, finish_squares, power
from mxstudy.kernels.device.pairs import numbers

ONE = tl.constexpr(0x3F800000)  # the float32 bits of 1


@triton.jit
def rms_of_rows(chunks, maxima, NORM: tl.constexpr, SHAPE: tl.constexpr):
    """Return the RMS, float32 [rows], and whether all numbers of a row are NEAR."""
    CHUNKS: tl.constexpr = SHAPE.chunks
    COLUMNS: tl.constexpr = SHAPE.columns
    BLOCK: tl.constexpr = SHAPE.block
    most = maxima[0]
    least = maxima[0].to(tl.uint32, bitcast=True) - 1  # minus 1, so that zeros wrap around and do not count
    for i in tl.static_range(1, CHUNKS):
        most = tl.maximum(most, maxima[i])
        least = tl.minimum(least, maxima[i].to(tl.uint32, bitcast=True) - 1)
    most, least, total = tl.reduce((most, least, sums(chunks, maxima, NORM, SHAPE)), 1, gathered)
    if NORM.p is None:
        _, rms = finish_squares(most, total, COLUMNS, BLOCK, NORM)
    elif NORM.is_direct:
        _, rms = finish_block_maxima(tl.zeros_like(most) + ONE, total, COLUMNS, BLOCK, NORM)
        near = is_near(rms, most, least)
        if tl.min(near.to(tl.int32), axis=0) == 0:  # some power may have over- or underflowed
            rms = tl.where(near, rms, rms_by_ratios(maxima, most, NORM, SHAPE))
    else:
        rms = rms_by_ratios(maxima, most, NORM, SHAPE)
    return rms, is_near(rms, most, least)


@triton.jit
def is_near(rms, most, least):
    """Return whether a row is NEAR (see `codes`); if it is, powers 1 and 2 are in FP32's range."""
    smallest = (least + 1).to(tl.float32, bitcast=True)
    near = (smallest == 0) | (smallest >= tl.maximum(rms, 1.0) / FAR)
    return near & (most.to(tl.float32, bitcast=True) <= rms * FAR) & (rms >= 1 / FARTHEST) & (rms <= FARTHEST)


@triton.jit
def gathered(most, least, total, other_most, other_least, other_total):
    return tl.maximum(most, other_most), tl.minimum(least, other_least), total + other_total


@triton.jit
def sums(chunks, maxima, NORM: tl.constexpr, SHAPE: tl.constexpr):
    """Return sums of squares, or of powers of maxima, over all chunks: float32 [rows, blocks].

    They are zeros if the RMS needs ratios.
    """
    CHUNKS: tl.constexpr = SHAPE.chunks
    if NORM.p is None:
        squares = tl.full((SHAPE.rows, SHAPE.spans, SHAPE.words), 0.0, tl.float32)
        for i in tl.static_range(CHUNKS):
            for v in tl.static_range(2):
                low, high = numbers(chunks[i][v])
                squares = tl.fma(high, high, tl.fma(low, low, squares))
        of_span = tl.sum(squares, axis=2)
        found = tl.sum(tl.reshape(of_span, (SHAPE.rows, SHAPE.blocks, SHAPE.spans // SHAPE.blocks)), axis=2)
    else:
        found = tl.full((SHAPE.rows, SHAPE.blocks), 0.0, tl.float32)
        if NORM.is_direct:
            for i in tl.static_range(CHUNKS):
                found += power(maxima[i].to(tl.float32, bitcast=True), NORM.p)
    return found


@triton.jit
def rms_by_ratios(maxima, most, NORM: tl.constexpr, SHAPE: tl.constexpr):
    """Return MXNorm's RMS from ratios to the largest number: no power overflows, and underflows do not matter."""
    CHUNKS: tl.constexpr = SHAPE.chunks
    largest, inverse_of_largest = invertible(most)
    powers = tl.full((SHAPE.rows, SHAPE.blocks), 0.0, tl.float32)
    for i in tl.static_range(CHUNKS):
        powers += power(maxima[i].to(tl.float32, bitcast=True) * inverse_of_largest[:, None], NORM.p)
    bits, total = largest.to(tl.int32, bitcast=True), tl.sum(powers, axis=1)
    _, rms = finish_block_maxima(bits, total, SHAPE.columns, SHAPE.block, NORM)
    return rms


@triton.jit
def invertible(bits):
    """Return the maxima with these bits, at least 2^-126, and 1 / that: float32.

    No quotient overflows FP32 on the way. The inverse of infinity is NaN; the results for NaN are arbitrary.
    """
    exponent = tl.minimum(tl.maximum(bits >> 23, 1), 253)
    unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    mantissa = tl.maximum(bits.to(tl.float32, bitcast=True) * unit, 1.0)
    return mantissa * (exponent << 23).to(tl.float32, bitcast=True), unit / mantissa
