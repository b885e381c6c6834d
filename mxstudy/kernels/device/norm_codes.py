"""Norm and cast of rows to codes in one pass: a program holds a few whole rows in its registers.

A row is up to eight chunks, each a power of two wide, so that other sizes leave few lanes idle or none. A chunk is
spans of 16 numbers, one per thread: two vectors of four words of two numbers. Both numbers of a word are processed at
once where possible.

Where all numbers of a program are NEAR (see `codes`), it goes on with what it has in registers; otherwise it reads its
rows again and divides, a chunk at a time.

NORM is a `NormConstants` of mxstudy.kernels.norm_cast, SHAPE and CAST are a `Shape` and an `EncodingConstants` of
mxstudy.kernels.norm_codes.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.codes import (
    divide,
    encode_bytes,
    encode_e2m1,
    encode_e4m3_scales,
    encode_e8m0_scales,
)
from mxstudy.kernels.device.counting import addends, count_e2m1
from mxstudy.kernels.device.pairs import MAGNITUDES, TWICE, largest_magnitude, numbers
from mxstudy.kernels.device.row_rms import rms_of_rows


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
    NORM: tl.constexpr,
    SHAPE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Encode x [rows, columns] bf16: codes, scales [rows, columns // block] of one byte each, rms [rows] float32.

    x, branch and total are int32 words of two numbers each. `branch`, unless None, is added to x first, and the sum,
    rounded to bf16, is stored in `total`.
    """
    CHUNKS: tl.constexpr = SHAPE.chunks
    COLUMNS: tl.constexpr = SHAPE.columns
    BLOCK: tl.constexpr = SHAPE.block
    first = tl.program_id(0).to(tl.int64) * SHAPE.rows
    left = (rows - first).to(tl.int32)
    x_ptr += first * (COLUMNS // 2)
    if branch_ptr is not None:
        branch_ptr += first * (COLUMNS // 2)
        total_ptr += first * (COLUMNS // 2)
    codes_ptr += first * (COLUMNS // CAST.numbers_a_byte)
    scales_ptr += first * (COLUMNS // BLOCK)

    chunks = ()
    maxima = ()
    for i in tl.static_range(CHUNKS):
        x = load_chunk(x_ptr, branch_ptr, total_ptr, i, left, SHAPE)
        chunks += (x,)
        maxima += (block_maxima(x, SHAPE),)

    rms, near = rms_of_rows(chunks, maxima, NORM, SHAPE)
    row = tl.arange(0, SHAPE.rows)
    tl.store(rms_ptr + first + row, rms, mask=None if SHAPE.whole_tiles else row < left)

    rms = rms[:, None]
    inverse = tl.div_rn(tl.zeros_like(rms) + 1.0, rms)
    if tl.min(near.to(tl.int32), axis=0) == 1:
        codes_of_scales = ()
        counted = ()
        if CAST.counted:
            counted = addends(rms, inverse, CAST)
        for near_chunk in tl.static_range(8):
            if near_chunk < CHUNKS:
                y = (chunks[near_chunk], maxima[near_chunk], rms, inverse, tensor_scale, counted)
                codes_of_scales += (store_codes(y, codes_ptr, near_chunk, left, True, CAST, SHAPE),)
            else:
                codes_of_scales += (codes_of_scales[0],)
        store_all_scales(codes_of_scales, scales_ptr, left, SHAPE)
    else:
        for far_chunk in range(CHUNKS):
            far = load_chunk(x_ptr, branch_ptr, None, far_chunk, left, SHAPE)
            z = (far, block_maxima(far, SHAPE), rms, inverse, tensor_scale, ())
            scale = store_codes(z, codes_ptr, far_chunk, left, False, CAST, SHAPE)
            store_items(scales_ptr, scale, far_chunk, left, 1, SHAPE)


@triton.jit
def load_chunk(x_ptr, branch_ptr, total_ptr, i, left, SHAPE: tl.constexpr):
    """Return a chunk's two vectors, int32 [rows, spans, words] each, with zeros beyond the matrix.

    It is read once, so it bypasses L1. In L2 it has no hint: evicting it first would make reads 8 % slower on an H200
    where earlier kernels have left data in L2 that is still to be written. `total_ptr`: where the sum with a branch
    goes, or None.
    """
    WIDTH: tl.constexpr = 2 * SHAPE.words  # words per span
    ITEMS: tl.constexpr = SHAPE.columns // 2
    row = tl.arange(0, SHAPE.rows)[:, None, None]
    first = (i * SHAPE.spans + tl.arange(0, SHAPE.spans)[None, :, None]) * WIDTH
    mask = tl.full((SHAPE.rows, SHAPE.spans, SHAPE.words), True, tl.int1)
    if not SHAPE.whole_tiles:
        mask = mask & (row < left)
    if ITEMS % (SHAPE.spans * WIDTH) != 0:
        mask = mask & (first < ITEMS)
    vectors = ()
    for v in tl.static_range(2):
        offsets = row * ITEMS + first + v * SHAPE.words + tl.arange(0, SHAPE.words)[None, None, :]
        x = tl.load(x_ptr + offsets, mask=mask, other=0, cache_modifier=".cg")
        if branch_ptr is not None:
            branch = tl.load(branch_ptr + offsets, mask=mask, other=0, cache_modifier=".cg")
            x = words_of_sums(x, branch)
            if total_ptr is not None:
                tl.store(total_ptr + offsets, x, mask=mask, cache_modifier=".cs")
        vectors += (x,)
    return vectors


@triton.jit
def words_of_sums(x, y):
    """Return the sums of bf16 numbers, rounded to bf16."""
    x_low, x_high = numbers(x)
    y_low, y_high = numbers(y)
    low = (x_low + y_low).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    high = (x_high + y_high).to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    return low | (high << 16)


@triton.jit
def block_maxima(vectors, SHAPE: tl.constexpr):
    """Return the bits, as of a float32, of the largest magnitude of every block: int32 [rows, blocks]."""
    if SHAPE.pairs:
        of_span = largest_magnitude(vectors[0], vectors[1])
    else:
        most = tl.full((SHAPE.rows, SHAPE.spans, SHAPE.words), 0, tl.int32)
        for v in tl.static_range(2):
            word = vectors[v] & MAGNITUDES
            most = tl.maximum(tl.maximum(most, word), word << 16)
        of_span = tl.max(most, axis=2)
    return tl.max(tl.reshape(of_span & -0x10000, (SHAPE.rows, SHAPE.blocks, SHAPE.spans // SHAPE.blocks)), axis=2)


@triton.jit
def for_spans(x, SHAPE: tl.constexpr):
    """Expand one value per block, [rows, blocks], to its spans: [rows, spans, 1]."""
    BLOCKS: tl.constexpr = x.shape[1]
    every = tl.broadcast_to(x[:, :, None], (SHAPE.rows, BLOCKS, SHAPE.spans // BLOCKS))
    return tl.reshape(every, (SHAPE.rows, SHAPE.spans))[:, :, None]


@triton.jit
def store_codes(y, codes_ptr, i, left, NEAR: tl.constexpr, CAST: tl.constexpr, SHAPE: tl.constexpr):
    """Store the codes of a chunk and return the codes of its scales, uint8 [rows, blocks].

    y: the chunk's vectors, its blocks' maxima [rows, blocks], rms and 1 / rms [rows, 1], the tensor scale, and the
    addends for counting, or nothing.
    """
    if len(y[5]) > 0:
        scale, codes = counted_codes(y, CAST, SHAPE)
    else:
        scale, codes = divided_codes(y, NEAR, CAST, SHAPE)
    store_items(codes_ptr, side_by_side(codes), i, left, 1, SHAPE)
    return scale


@triton.jit
def counted_codes(y, CAST: tl.constexpr, SHAPE: tl.constexpr):
    FORMAT: tl.constexpr = CAST.format
    vectors, maxima, rms, inverse, _, addends = y
    absmax = divide(maxima.to(tl.float32, bitcast=True), rms, inverse, True, CAST)
    scale, power_of_two, _ = encode_e8m0_scales(absmax, True, FORMAT)
    moved = (power_of_two.to(tl.int32, bitcast=True) >> 16) * TWICE
    terms = ()
    for i in tl.static_range(4):
        terms += (for_spans(addends[i] - moved, SHAPE),)
    return scale, (count_e2m1(vectors[0], terms), count_e2m1(vectors[1], terms))


@triton.jit
def divided_codes(y, NEAR: tl.constexpr, CAST: tl.constexpr, SHAPE: tl.constexpr):
    FORMAT: tl.constexpr = CAST.format
    vectors, maxima, rms, inverse, tensor_scale, _ = y
    absmax = divide(maxima.to(tl.float32, bitcast=True), rms, inverse, NEAR, CAST)
    if CAST.e4m3_scales:
        scale, factor = encode_e4m3_scales(absmax, tensor_scale, NEAR)
    else:
        scale, power_of_two, factor = encode_e8m0_scales(absmax, NEAR, FORMAT)
    if NEAR and not CAST.e4m3_scales:  # x / (rms 2^k) is (x / rms) / 2^k, bit by bit
        rms, inverse = for_spans(rms * power_of_two, SHAPE), for_spans(inverse * factor, SHAPE)
    else:
        rms, inverse, factor = rms[:, :, None], inverse[:, :, None], for_spans(factor, SHAPE)
    codes = ()
    for v in tl.static_range(2):
        word = vectors[v]
        low, high = numbers(word & MAGNITUDES if CAST.element is None else word)
        low, high = divide(low, rms, inverse, NEAR, CAST), divide(high, rms, inverse, NEAR, CAST)
        if CAST.e4m3_scales or not NEAR:
            low, high = low * factor, high * factor
        code = encode_e2m1(low, high, word, NEAR, CAST) if CAST.element is None else encode_bytes(low, high, NEAR, CAST)
        codes += (code,)
    return scale, codes


@triton.jit
def side_by_side(vectors):
    """Join both vectors of the spans, [rows, spans, items] each: [rows, all items]."""
    x = tl.permute(tl.join(vectors[0], vectors[1]), (0, 1, 3, 2))
    return tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2] * x.shape[3]))


@triton.jit
def store_all_scales(s, scales_ptr, left, SHAPE: tl.constexpr):
    """Store the scale codes of eight chunks at once, so that a thread's bytes are adjacent."""
    low = tl.join(tl.join(s[0], s[1]), tl.join(s[2], s[3]))
    high = tl.join(tl.join(s[4], s[5]), tl.join(s[6], s[7]))
    together = tl.permute(tl.join(low, high), (0, 4, 3, 2, 1))
    together = tl.reshape(together, (SHAPE.rows, 8 * s[0].shape[1]))
    store_items(scales_ptr, together, 0, left, 8, SHAPE)


@triton.jit
def store_items(ptr, x, i, left, CHUNKS: tl.constexpr, SHAPE: tl.constexpr):
    """Store x [rows, items of CHUNKS chunks] as the i-th such part of a row, with the hint that it is not read soon."""
    WIDTH: tl.constexpr = CHUNKS * SHAPE.spans * SHAPE.words * 4
    ITEMS: tl.constexpr = x.shape[1] * SHAPE.columns // WIDTH
    row = tl.arange(0, x.shape[0])[:, None]
    item = i * x.shape[1] + tl.arange(0, x.shape[1])[None, :]
    mask = tl.full((x.shape[0], x.shape[1]), True, tl.int1)
    if not SHAPE.whole_tiles:
        mask = mask & (row < left)
    if SHAPE.columns % WIDTH != 0:
        mask = mask & (item < ITEMS)
    tl.store(ptr + row * ITEMS + item, x, mask=mask, cache_modifier=".cs")
