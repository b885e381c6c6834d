"""Block scales of one operand: the device side of `mxstudy.numerics.scales`, with the reference's bits.

CAST is a `CompiledCast` of mxstudy.kernels.operand_cast, and a part is what `mxstudy.kernels.device.cast_any` holds.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import EXPONENT_MASK, NAN_BITS, round_to_grid, scales

FP32_MAX = tl.constexpr(3.4028234663852886e38)
MIN_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def scales_of(maxima, outer_ptr, FACTOR: tl.constexpr, CAST: tl.constexpr):
    """Return two numbers for each block: one that its elements meet before they are rounded, and one that decodes them.

        E8M0, E4M3     the factor on the elements, as 2^-k, and the scale, as 2^k
        FP32, none     the scale (of the block, of the tensor), which divides the elements, and 1: they stay undecoded

    `maxima`: the bits of each block's absmax. FACTOR: a candidate, by which the range is multiplied.
    """
    FORMAT: tl.constexpr = CAST.format
    inverse = ()
    scale = ()
    for block in tl.static_range(len(maxima)):
        bits = maxima[block]
        if CAST.square:
            bits = over_squares(bits, CAST)
        if FACTOR != 1:
            bits = (bits.to(tl.float32, bitcast=True) * FACTOR).to(tl.int32, bitcast=True)
        if CAST.fp32 is not None:
            of_block = fp32_scales(bits if outer_ptr is None else bits_of(outer_ptr, bits), CAST)
        else:
            of_block = scales(bits, FORMAT) if CAST.e4m3 is None else e4m3_scales(bits, outer_ptr, CAST)
        inverse += (of_block[0],)
        scale += (of_block[1],)
    return inverse, scale


@triton.jit
def e4m3_scales(bits, outer_ptr, CAST: tl.constexpr):
    """Return the factors on the elements and the scales of blocks with these absmax bits, float32.

    `numerics.scales.e4m3_training_scales` has the same operations in the same order. `outer_ptr`: the absmax of all
    blocks, float32 [1]; None for blocks without a scale above them.
    """
    E4M3: tl.constexpr = CAST.e4m3.format
    ones = tl.zeros_like(bits).to(tl.float32) + 1.0
    finite = bits < EXPONENT_MASK
    encode = ones
    if outer_ptr is not None:
        outer = tl.load(outer_ptr) + tl.zeros_like(ones)
        finite = finite & (outer < float("inf"))
        encode = tl.minimum(tl.div_rn(ones * CAST.e4m3.largest, outer), FP32_MAX)
        encode = tl.where((outer == 0.0) | (encode == 0.0), 1.0, encode)
    absmax = bits.to(tl.float32, bitcast=True)
    scale = round_to_grid(absmax * (encode * CAST.e4m3.inverse), E4M3, False)
    factor = tl.minimum(tl.div_rn(ones, scale * tl.div_rn(ones, encode)), FP32_MAX)
    nan = tl.full(bits.shape, NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(finite, factor, nan), tl.where(finite, scale, nan)


@triton.jit
def bits_of(outer_ptr, like):
    """Return the bits of the absmax of all blocks, int32, in the shape of `like`."""
    return tl.load(outer_ptr).to(tl.int32, bitcast=True) + tl.zeros_like(like)


@triton.jit
def fp32_scales(bits, CAST: tl.constexpr):
    """Return the FP32 scales of blocks with these absmax bits, and 1; both are NaN where absmax is not finite.

    `numerics.scales.fill_scale` has the same quotient, rounded once.
    """
    ones = tl.zeros_like(bits).to(tl.float32) + 1.0
    scale = tl.maximum(tl.div_rn(bits.to(tl.float32, bitcast=True), ones * CAST.fp32), MIN_NORMAL)
    nan = tl.full(bits.shape, NAN_BITS, tl.int32).to(tl.float32, bitcast=True)
    return tl.where(bits < EXPONENT_MASK, scale, nan), tl.where(bits < EXPONENT_MASK, ones, nan)


@triton.jit
def store_scales(ptr, scales, row, column, mask, CAST: tl.constexpr):
    """Store one scale for each block and each position across the contraction axis: float32."""
    BLOCK: tl.constexpr = CAST.block
    for block in tl.static_range(len(scales)):
        if CAST.axis == 0:
            at = (row // BLOCK + block) * CAST.columns + column
        else:
            at = row * (CAST.columns // BLOCK) + column // BLOCK + block
        tl.store(ptr + at, scales[block], mask=mask)


@triton.jit
def over_squares(bits, CAST: tl.constexpr):
    """Return the largest of each BLOCK neighbours across the contraction axis, for every one of them."""
    ROWS: tl.constexpr = bits.shape[0]
    COLUMNS: tl.constexpr = bits.shape[1]
    BLOCK: tl.constexpr = CAST.block
    AXIS: tl.constexpr = CAST.axis
    if AXIS == 1:
        squares = tl.reshape(bits, (ROWS // BLOCK, BLOCK, COLUMNS))
    else:
        squares = tl.reshape(bits, (ROWS, COLUMNS // BLOCK, BLOCK))
    largest = tl.max(squares, axis=2 - AXIS, keep_dims=True)
    return tl.reshape(tl.broadcast_to(largest, squares.shape), (ROWS, COLUMNS))
