"""One operand by any recipe: the device side of `mxstudy.kernels.cast_any`, with the reference's bits.

A group is a run of neighbours along the contraction axis that depends on no other group. A program holds a tile of
groups, part by part, as a tuple: one tensor [groups below, groups beside one another] for each element of a part. So
butterflies and maxima are elementwise for either axis, and one thread's registers hold what belongs together.

A group whose elements do not fit in registers has several parts (rows of a block). They are read twice: for the block's
maximum, and to be rounded. CAST is a `CompiledCast` of mxstudy.kernels.operand_cast.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.block_scales import scales_of, store_scales
from mxstudy.kernels.device.cast_both import magnitude_bits, round_to_bf16_away, round_to_grid, through_bf16
from mxstudy.kernels.device.choice import better, errors
from mxstudy.kernels.device.parts import load, store
from mxstudy.kernels.device.random_bits import philox, round_stochastically

WORDS = tl.constexpr(4)  # random words per counter


@triton.jit
def cast_any_kernel(
    x_ptr,
    mean_ptr,
    rms_ptr,
    gain_ptr,
    bias_ptr,
    signs_ptr,
    key_ptr,
    place_ptr,
    outer_ptr,
    scales_ptr,
    result_ptr,
    rows,
    CAST: tl.constexpr,
):
    """Cast x [rows, columns] to one operand in bf16; a step whose pointer is None is left out.

    Only FP32 scales have a `scales_ptr`: they are stored there, and the operand has the elements alone.
    """
    pointers = (x_ptr, mean_ptr, rms_ptr, gain_ptr, bias_ptr, signs_ptr)
    cast_tile(pointers, key_ptr, place_ptr, outer_ptr, scales_ptr, result_ptr, rows, CAST)


@triton.jit
def cast_any_both_kernel(x_ptr, outer_ptr, row_ptr, column_ptr, rows, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """Cast x to both of its operands. Both tiles of a program are one part of x, and a cache has it the second time."""
    pointers = (x_ptr, None, None, None, None, None)
    cast_tile(pointers, None, None, outer_ptr, None, row_ptr, rows, ROW)
    cast_tile(pointers, None, None, outer_ptr, None, column_ptr, rows, COLUMN)


@triton.jit
def cast_tile(pointers, key_ptr, place_ptr, outer_ptr, scales_ptr, result_ptr, rows, CAST: tl.constexpr):
    """Cast this program's tile of x; `pointers`: those of x and of what precedes its cast, as `prepared` takes them."""
    COLUMNS: tl.constexpr = CAST.columns
    PARTS: tl.constexpr = CAST.parts
    BELOW: tl.constexpr = CAST.groups.rows
    BESIDE: tl.constexpr = CAST.groups.columns
    row, column, quad, mask = tile(rows, CAST)

    if PARTS == 1:
        x = prepared(pointers, row, column, mask, CAST)
        if CAST.format is not None:
            bits = maxima(x, CAST)
            scale = scales_of(bits, outer_ptr, CAST.candidates[0], CAST)
            if scales_ptr is not None:
                store_scales(scales_ptr, scale[0], row, column, mask, CAST)
            if len(CAST.candidates) == 1:
                x = quantized(x, scale, row, column, quad, key_ptr, place_ptr, CAST)
            else:
                x = best(x, bits, row, column, quad, key_ptr, place_ptr, outer_ptr, CAST)
        store(result_ptr, row * COLUMNS + column, mask, x, CAST)
    else:
        bits = tl.zeros((BELOW, BESIDE), tl.int32)
        for part in range(PARTS):
            part_row, part_column = part_of(row, column, part, CAST)
            x = prepared(pointers, part_row, part_column, mask, CAST)
            bits = tl.maximum(bits, maxima(x, CAST)[0])
        scale_of_all = scales_of((bits,), outer_ptr, CAST.candidates[0], CAST)
        if scales_ptr is not None:
            store_scales(scales_ptr, scale_of_all[0], row, column, mask, CAST)
        for part in range(PARTS):
            here, beside = part_of(row, column, part, CAST)
            y = prepared(pointers, here, beside, mask, CAST)
            y = quantized(y, scale_of_all, here, beside, quad, key_ptr, place_ptr, CAST)
            store(result_ptr, here * COLUMNS + beside, mask, y, CAST)


@triton.jit
def absmax_any_kernel(x_ptr, mean_ptr, rms_ptr, gain_ptr, bias_ptr, signs_ptr, result_ptr, rows, CAST: tl.constexpr):
    """Store the bits of the largest magnitude of each tile of what `cast_any_kernel` casts: int32 [tiles]."""
    PARTS: tl.constexpr = CAST.parts
    BELOW: tl.constexpr = CAST.groups.rows
    BESIDE: tl.constexpr = CAST.groups.columns
    row, column, _, mask = tile(rows, CAST)
    pointers = (x_ptr, mean_ptr, rms_ptr, gain_ptr, bias_ptr, signs_ptr)
    bits = tl.zeros((BELOW, BESIDE), tl.int32)
    for part in range(PARTS):
        here, beside = part_of(row, column, part, CAST)
        of_blocks = maxima(prepared(pointers, here, beside, mask, CAST), CAST)
        for block in tl.static_range(len(of_blocks)):
            bits = tl.maximum(bits, of_blocks[block])
    tl.store(result_ptr + tl.program_id(0), tl.max(tl.where(mask, bits, 0)))


@triton.jit
def tile(rows, CAST: tl.constexpr):
    """Return the first row and column of each group of this program's tile, the tile's first column / 4, and a mask."""
    AXIS: tl.constexpr = CAST.axis
    BELOW: tl.constexpr = CAST.groups.rows
    BESIDE: tl.constexpr = CAST.groups.columns
    COLUMNS: tl.constexpr = CAST.columns
    GROUP: tl.constexpr = CAST.part_size * CAST.parts
    HEIGHT: tl.constexpr = GROUP if AXIS == 0 else 1
    WIDTH: tl.constexpr = GROUP if AXIS == 1 else 1
    ACROSS: tl.constexpr = (COLUMNS + BESIDE * WIDTH - 1) // (BESIDE * WIDTH)
    row = ((tl.program_id(0) // ACROSS).to(tl.int64) * BELOW + tl.arange(0, BELOW)[:, None]) * HEIGHT
    column = (tl.program_id(0) % ACROSS * BESIDE + tl.arange(0, BESIDE)[None, :]) * WIDTH
    quad = tl.program_id(0) % ACROSS * (BESIDE * WIDTH // WORDS)
    mask = column < COLUMNS if AXIS == 0 else row < rows
    return row, column, quad, mask


@triton.jit
def part_of(row, column, part, CAST: tl.constexpr):
    """Return the first row and column of that part of each group."""
    PART: tl.constexpr = CAST.part_size
    if CAST.axis == 0:
        row += part * PART
    else:
        column += part * PART
    return row, column


# ------------------------------------------------------------------------------------------- what precedes the cast


@triton.jit
def prepared(pointers, row, column, mask, CAST: tl.constexpr):
    """Load a part and apply norm, transform and pre-rounding: one tensor for each element of the part."""
    COLUMNS: tl.constexpr = CAST.columns
    x_ptr, mean_ptr, rms_ptr, gain_ptr, bias_ptr, signs_ptr = pointers
    x = load(x_ptr, row * COLUMNS + column, mask, COLUMNS if CAST.axis == 0 else 1, CAST)
    x = normed(x, mean_ptr, rms_ptr, gain_ptr, bias_ptr, row, column, mask, CAST)
    if CAST.transform is not None:
        x = transformed(x, signs_ptr, CAST)
    if CAST.format is not None and CAST.pre_round:
        x = pre_rounded(x, CAST)
    return x


@triton.jit
def normed(x, mean_ptr, rms_ptr, gain_ptr, bias_ptr, row, column, mask, CAST: tl.constexpr):
    """Return (x - mean) / rms * gain + bias, after x is rounded to bf16 if the cast rounds first."""
    PART: tl.constexpr = CAST.part_size
    AXIS: tl.constexpr = CAST.axis
    of_rows = mask if AXIS == 1 else None
    of_columns = mask if AXIS == 0 else None
    mean = ()
    rms = ()
    gain = ()
    bias = ()
    if mean_ptr is not None:
        mean = load(mean_ptr, row, of_rows, 1 - AXIS, CAST)
    if rms_ptr is not None:
        rms = load(rms_ptr, row, of_rows, 1 - AXIS, CAST)
    if gain_ptr is not None:
        gain = load(gain_ptr, column, of_columns, AXIS, CAST)
    if bias_ptr is not None:
        bias = load(bias_ptr, column, of_columns, AXIS, CAST)
    places = ()
    for i in tl.static_range(PART):
        y = through_bf16(x[i], CAST.round_first)
        if mean_ptr is not None:
            y = y - mean[i]
        if rms_ptr is not None:
            y = tl.div_rn(y, rms[i] + tl.zeros_like(y))
        if gain_ptr is not None:
            y = y * gain[i]
        if bias_ptr is not None:
            y = y + bias[i]
        places += (y,)
    return places


@triton.jit
def transformed(x, signs_ptr, CAST: tl.constexpr):
    """Apply the Hadamard transform to each tile of a group, sums at strides 1, 2, 4, ..., and round to bf16."""
    PART: tl.constexpr = CAST.part_size
    SIZE: tl.constexpr = CAST.transform.size
    if not CAST.transform.signs_after:
        x = signed(x, signs_ptr, CAST)
    for stage in tl.static_range(7):
        if (1 << stage) < SIZE:
            x = butterfly(x, 1 << stage, CAST)
    y = ()
    for i in tl.static_range(PART):
        y += (through_bf16(x[i] * CAST.transform.scale, True),)
    if CAST.transform.signs_after:
        y = signed(y, signs_ptr, CAST)
    return y


@triton.jit
def butterfly(x, STRIDE: tl.constexpr, CAST: tl.constexpr):
    """Map (a, b) to (a + b, a - b) for elements that are STRIDE apart."""
    PART: tl.constexpr = CAST.part_size
    y = ()
    for i in tl.static_range(PART):
        if i & STRIDE == 0:
            y += (x[i] + x[i + STRIDE],)
        else:
            y += (x[i - STRIDE] - x[i],)
    return y


@triton.jit
def signed(x, signs_ptr, CAST: tl.constexpr):
    """Multiply x by the signs of its elements in a tile of the transform, if there are signs."""
    PART: tl.constexpr = CAST.part_size
    y = ()
    for i in tl.static_range(PART):
        if signs_ptr is None:
            y += (x[i],)
        else:
            y += (x[i] * tl.load(signs_ptr + i % CAST.transform.size),)
    return y


# --------------------------------------------------------------------------------------------------------- the cast


@triton.jit
def pre_rounded(x, CAST: tl.constexpr):
    PART: tl.constexpr = CAST.part_size
    y = ()
    for i in tl.static_range(PART):
        y += (round_to_bf16_away(x[i]),)
    return y


@triton.jit
def maxima(x, CAST: tl.constexpr):
    """Return the bits of the largest magnitude of every block of a part, or of the part of a block."""
    PART: tl.constexpr = CAST.part_size
    BLOCK: tl.constexpr = min(CAST.block, PART)
    found = ()
    for block in tl.static_range(PART // BLOCK):
        bits = magnitude_bits(x[block * BLOCK])
        for i in tl.static_range(1, BLOCK):
            bits = tl.maximum(bits, magnitude_bits(x[block * BLOCK + i]))
        found += (bits,)
    return found


@triton.jit
def best(x, bits, row, column, first_quad, key_ptr, place_ptr, outer_ptr, CAST: tl.constexpr):
    """Return a part quantised by the candidate with the smallest error in each block, and decoded."""
    chosen = ()
    least = ()
    for i in tl.static_range(len(CAST.candidates)):
        scale = scales_of(bits, outer_ptr, CAST.candidates[i], CAST)
        values = rounded(x, scale[0], row, column, first_quad, key_ptr, place_ptr, CAST)
        error = errors(values, scale[1], x, outer_ptr, CAST)
        operand = decoded(values, scale[1], CAST)
        if i == 0:
            chosen = operand
            least = error
        else:
            chosen, least = better(chosen, least, operand, error, CAST)
    return chosen


@triton.jit
def quantized(x, scale, row, column, first_quad, key_ptr, place_ptr, CAST: tl.constexpr):
    """Return a part rounded to the grid and decoded, float32."""
    values = rounded(x, scale[0], row, column, first_quad, key_ptr, place_ptr, CAST)
    return decoded(values, scale[1], CAST)


@triton.jit
def decoded(values, scale, CAST: tl.constexpr):
    """Return element values times the scales of their blocks."""
    PART: tl.constexpr = CAST.part_size
    BLOCK: tl.constexpr = min(CAST.block, PART)
    found = ()
    for i in tl.static_range(PART):
        found += (values[i] * scale[i // BLOCK],)
    return found


@triton.jit
def rounded(x, inverse, row, column, first_quad, key_ptr, place_ptr, CAST: tl.constexpr):
    """Return the element values of a part over its scales. `first_quad`: the tile's first column / 4."""
    PART: tl.constexpr = CAST.part_size
    BLOCK: tl.constexpr = min(CAST.block, PART)
    FORMAT: tl.constexpr = CAST.format
    AWAY: tl.constexpr = CAST.away
    BITS: tl.constexpr = CAST.random_bits
    values = ()
    for quad in tl.static_range(PART // WORDS):
        words = ()
        if BITS > 0:
            words = drawn(quad, row, column, first_quad, key_ptr, place_ptr, CAST)
        for i in tl.static_range(WORDS):
            if CAST.fp32 is None:
                v = x[quad * WORDS + i] * inverse[(quad * WORDS + i) // BLOCK]
                if CAST.headroom is not None:
                    v = v * CAST.headroom
            else:
                v = tl.div_rn(x[quad * WORDS + i], inverse[(quad * WORDS + i) // BLOCK])
            v = round_stochastically(v, words[i], FORMAT, BITS) if BITS > 0 else round_to_grid(v, FORMAT, AWAY)
            values += (v,)
    return values


@triton.jit
def drawn(quad, row, column, first_quad, key_ptr, place_ptr, CAST: tl.constexpr):
    """Return the random words of the quad-th four elements of a part: uint32, equal to `random_bits.random_words`."""
    BELOW: tl.constexpr = CAST.groups.rows
    BESIDE: tl.constexpr = CAST.groups.columns
    k0 = tl.load(key_ptr).to(tl.uint32)
    k1 = tl.load(key_ptr + 1).to(tl.uint32)
    step = tl.load(place_ptr).to(tl.uint32)
    of_row = tl.load(place_ptr + 1) + row
    words = ()
    if CAST.axis == 1:  # four columns of a row
        words = philox(column // WORDS + quad, of_row, step, k0, k1)
    else:  # a column of four rows
        quads = first_quad + tl.arange(0, BESIDE // WORDS)[None, :]
        for i in tl.static_range(WORDS):
            w0, w1, w2, w3 = philox(quads, of_row + (quad * WORDS + i), step, k0, k1)
            four = tl.join(tl.join(w0, w2), tl.join(w1, w3))
            words += (tl.reshape(four, (BELOW, BESIDE)),)
    return words
