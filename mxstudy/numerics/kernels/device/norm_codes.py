"""Norm and cast of rows to codes, in one pass: a program has a few whole rows in its registers.

A row is up to eight chunks, a power of two wide, so that sizes that are no powers of two leave few lanes idle or none.

Where all numbers of a program are NEAR, which `codes` explains, it goes on with what it has in registers; else it reads
its rows again and divides, a chunk at a time.

SHAPE is (rows of the tile, blocks of a chunk, BLOCK, COLUMNS, WHOLE_TILES), CAST is (ELEMENT, FORMAT, E4M3_SCALES,
AWAY, PRE_ROUND), each as `norm_codes_kernel` has it.
"""

import triton
import triton.language as tl

from mxstudy.numerics.kernels.device.cast import magnitude_bits
from mxstudy.numerics.kernels.device.codes import (
    FAR,
    FARTHEST,
    divide,
    encode_bytes,
    encode_e2m1,
    encode_e4m3_scales,
    encode_e8m0_scales,
)
from mxstudy.numerics.kernels.device.norm import finish_block_maxima, finish_squares, power


@triton.jit
def norm_codes_kernel(
    x_ptr,
    branch_ptr,
    total_ptr,
    codes_ptr,
    scales_ptr,
    rms_ptr,
    rows,
    tensor_scale,
    P: tl.constexpr,
    COEFFICIENT: tl.constexpr,
    EPS: tl.constexpr,
    ELEMENT: tl.constexpr,
    FORMAT: tl.constexpr,
    E4M3_SCALES: tl.constexpr,
    AWAY: tl.constexpr,
    PRE_ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
):
    """x [rows, COLUMNS] bf16 -> codes, scales [rows, COLUMNS // BLOCK] of one byte each, rms [rows] float32.

    `branch`, or None, is added to x first, and the sum, rounded to bf16, written to `total`.
    P is None for the exact RMS. ELEMENT: Triton's type of an element, None for E2M1, of which two are a byte.
    E4M3_SCALES: relative to the tensor scale. WHOLE_TILES: TILE_ROWS divides the rows.
    """
    SHAPE: tl.constexpr = (TILE_ROWS, CHUNK // BLOCK, BLOCK, COLUMNS, WHOLE_TILES)
    CAST: tl.constexpr = (ELEMENT, FORMAT, E4M3_SCALES, AWAY, PRE_ROUND)
    CHUNKS: tl.constexpr = (COLUMNS + CHUNK - 1) // CHUNK
    first = tl.program_id(0).to(tl.int64) * TILE_ROWS
    left = (rows - first).to(tl.int32)
    x_ptr += first * COLUMNS
    if branch_ptr is not None:
        branch_ptr += first * COLUMNS
        total_ptr += first * COLUMNS
    codes_ptr += first * (COLUMNS // 2 if ELEMENT is None else COLUMNS)
    scales_ptr += first * (COLUMNS // BLOCK)

    chunks = ()
    maxima = ()
    for i in tl.static_range(CHUNKS):
        x = load_chunk(x_ptr, branch_ptr, i, left, SHAPE)
        if branch_ptr is not None:
            store_chunk(total_ptr, x, i, left, SHAPE)
        chunks += (x,)
        maxima += (block_maxima(x, SHAPE),)

    most = maxima[0]
    least = maxima[0].to(tl.uint32, bitcast=True) - 1  # of what is not zero, less one
    for i in tl.static_range(1, CHUNKS):
        most = tl.maximum(most, maxima[i])
        least = tl.minimum(least, maxima[i].to(tl.uint32, bitcast=True) - 1)
    if P is None:
        squares = tl.zeros((TILE_ROWS, CHUNK // BLOCK, BLOCK), tl.float32)
        for i in tl.static_range(CHUNKS):
            squares = tl.fma(in_blocks(chunks[i], SHAPE), in_blocks(chunks[i], SHAPE), squares)
        total = tl.sum(tl.sum(squares, axis=2), axis=1)
        _, rms = finish_squares(tl.zeros_like(total), total, COLUMNS, BLOCK, P, COEFFICIENT, EPS)
    else:
        largest, inverse_of_largest = invertible(tl.max(most, axis=1))
        powers = tl.zeros_like(most.to(tl.float32))
        for i in tl.static_range(CHUNKS):
            powers += power(maxima[i].to(tl.float32, bitcast=True) * inverse_of_largest[:, None], P)
        bits, total = largest.to(tl.int32, bitcast=True), tl.sum(powers, axis=1)
        _, rms = finish_block_maxima(bits, total, COLUMNS, BLOCK, P, COEFFICIENT, EPS)
    row = tl.arange(0, TILE_ROWS)
    tl.store(rms_ptr + first + row, rms, mask=None if WHOLE_TILES else row < left)

    rms = rms[:, None]
    inverse = tl.div_rn(tl.zeros_like(rms) + 1.0, rms)
    smallest = (least + 1).to(tl.float32, bitcast=True)
    near = (smallest == 0) | (smallest >= tl.maximum(rms, 1.0) / FAR)
    near = near & (most.to(tl.float32, bitcast=True) <= rms * FAR) & (rms >= 1 / FARTHEST) & (rms <= FARTHEST)
    if tl.min(tl.min(near.to(tl.int32), axis=1), axis=0) == 1:
        codes_of_scales = ()
        for near_chunk in tl.static_range(8):
            if near_chunk < CHUNKS:
                y = (chunks[near_chunk], maxima[near_chunk], rms, inverse, tensor_scale)
                codes_of_scales += (store_codes(y, codes_ptr, near_chunk, left, True, CAST, SHAPE),)
            else:
                codes_of_scales += (codes_of_scales[0],)
        store_all_scales(codes_of_scales, scales_ptr, left, SHAPE)
    else:
        for far_chunk in range(CHUNKS):
            far = load_chunk(x_ptr, branch_ptr, far_chunk, left, SHAPE)
            z = (far, block_maxima(far, SHAPE), rms, inverse, tensor_scale)
            scale = store_codes(z, codes_ptr, far_chunk, left, False, CAST, SHAPE)
            store_chunk(scales_ptr, scale, far_chunk, left, SHAPE)


@triton.jit
def load_chunk(x_ptr, branch_ptr, i, left, SHAPE: tl.constexpr):
    """[rows, CHUNK] bf16, zeros beyond the matrix. It is read once, and then in nobody's way in the cache."""
    offsets, mask = offsets_in(i, left, SHAPE, SHAPE[2], 1)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
        x = (x.to(tl.float32) + branch.to(tl.float32)).to(tl.bfloat16)
    return x


@triton.jit
def store_chunk(ptr, x, i, left, SHAPE: tl.constexpr):
    """x [rows, items] to the i-th of the chunks that it is one of; it is not read soon."""
    offsets, mask = offsets_in(i, left, SHAPE, x.shape[1] // SHAPE[1], 1)
    tl.store(ptr + offsets, x, mask=mask, cache_modifier=".cs")


@triton.jit
def offsets_in(i, left, SHAPE: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr):
    """Offsets and mask of the i-th `CHUNKS` chunks in a matrix [rows, items] that has SIZE items a block."""
    ROWS: tl.constexpr = SHAPE[0]
    WIDTH: tl.constexpr = CHUNKS * SHAPE[1] * SIZE
    ITEMS: tl.constexpr = SHAPE[3] // SHAPE[2] * SIZE
    row = tl.arange(0, ROWS)[:, None]
    item = i * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = tl.full((ROWS, WIDTH), True, tl.int1)
    if not SHAPE[4]:
        mask = mask & (row < left)
    if ITEMS % WIDTH != 0:
        mask = mask & (item < ITEMS)
    return row * ITEMS + item, mask


@triton.jit
def in_blocks(x, SHAPE: tl.constexpr):
    """[rows, CHUNK] -> float32 [rows, blocks, BLOCK]."""
    return tl.reshape(x, (SHAPE[0], SHAPE[1], SHAPE[2])).to(tl.float32)


@triton.jit
def block_maxima(x, SHAPE: tl.constexpr):
    """The bits of the largest magnitude of every block: int32 [rows, blocks]."""
    return tl.max(magnitude_bits(in_blocks(x, SHAPE)), axis=2)


@triton.jit
def invertible(bits):
    """The maxima with these bits, or 2^-126 where they are less, and 1 over that: float32.

    No quotient of FP32 overflows on the way. NaN for 1 over infinity; NaN has any.
    """
    exponent = tl.minimum(tl.maximum(bits >> 23, 1), 253)
    unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    mantissa = tl.maximum(bits.to(tl.float32, bitcast=True) * unit, 1.0)
    return mantissa * (exponent << 23).to(tl.float32, bitcast=True), unit / mantissa


@triton.jit
def store_codes(y, codes_ptr, i, left, NEAR: tl.constexpr, CAST: tl.constexpr, SHAPE: tl.constexpr):
    """Of a chunk; returns the codes of its scales, uint8 [rows, blocks].

    y: x [rows, CHUNK], its blocks' maxima [rows, blocks], rms and 1 / rms [rows, 1], the tensor scale.
    """
    x, maxima, rms, inverse, tensor_scale = y
    absmax = divide(maxima.to(tl.float32, bitcast=True), rms, inverse, NEAR, CAST)
    if CAST[2]:
        scale, factor = encode_e4m3_scales(absmax, tensor_scale, NEAR)
    else:
        scale, power_of_two, factor = encode_e8m0_scales(absmax, NEAR, CAST[1])
    x = in_blocks(x, SHAPE)
    values = tl.abs(x) if CAST[0] is None else x
    if NEAR and not CAST[2]:  # x / (rms 2^k) is (x / rms) / 2^k, bit by bit
        rms, inverse = (rms * power_of_two)[:, :, None], (inverse * factor)[:, :, None]
        values = divide(values, rms, inverse, NEAR, CAST)
    else:
        values = divide(values, rms[:, :, None], inverse[:, :, None], NEAR, CAST) * factor[:, :, None]
    codes = encode_e2m1(values, x, NEAR, CAST) if CAST[0] is None else encode_bytes(values, NEAR, CAST)
    store_chunk(codes_ptr, codes, i, left, SHAPE)
    return scale


@triton.jit
def store_all_scales(s, scales_ptr, left, SHAPE: tl.constexpr):
    """Those of eight chunks at once: a thread has bytes that lie side by side."""
    low = tl.join(tl.join(s[0], s[1]), tl.join(s[2], s[3]))
    high = tl.join(tl.join(s[4], s[5]), tl.join(s[6], s[7]))
    together = tl.permute(tl.join(low, high), (0, 4, 3, 2, 1))
    offsets, mask = offsets_in(0, left, SHAPE, 1, 8)
    tl.store(scales_ptr + offsets, tl.reshape(together, (SHAPE[0], 8 * SHAPE[1])), mask=mask, cache_modifier=".cs")
