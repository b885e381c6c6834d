"""What a cast does to its elements, counted in one pass: the quantised tensor is never stored.

A program has one tile with whole blocks, and writes its sums. Sums of squares are in float64, because those of small
gradients are below FP32's range.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import (
    EXPONENT_MASK,
    in_blocks,
    magnitude_bits,
    round_to_bf16_away,
    round_to_grid,
    scale_code,
    scales,
    tile_offsets,
)

BIAS = tl.constexpr(127)  # of E8M0


@triton.jit
def cast_counts_kernel(
    x_ptr,
    counts_ptr,
    AXIS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Count over x [rows, COLUMNS] in blocks along AXIS, and write the program's column of counts [9, programs].

    Blocks that are not finite count in none of the first three, and make the rest NaN. LARGEST: the largest element.
    """
    FORMAT: tl.constexpr = CAST.column if AXIS == 0 else CAST.row
    BLOCK: tl.constexpr = CAST.block
    given = tl.load(x_ptr + tile_offsets(COLUMNS, COLUMNS, TILE)).to(tl.float32)
    read = given
    if CAST.pre_round:
        read = round_to_bf16_away(given)
    x, given = in_blocks(read, AXIS, BLOCK), in_blocks(given, AXIS, BLOCK)
    bits = tl.max(magnitude_bits(x), axis=AXIS + 1, keep_dims=True)
    inverse, scale = scales(bits, FORMAT)
    element = round_to_grid(x * inverse, FORMAT, CAST.away)
    is_finite = bits < EXPONENT_MASK
    noise = (element * scale).to(tl.float64) - given.to(tl.float64)

    largest = tl.max(magnitude_bits(element), axis=AXIS + 1, keep_dims=True)
    is_counted = (largest > 0) | ~is_finite  # blocks of zeros have no exponent
    exponent = (scale_code(bits, FORMAT) - BIAS).to(tl.float64)

    column = counts_ptr + tl.program_id(0)
    count = tl.num_programs(0)
    tl.store(column, total((tl.abs(x) > LARGEST * scale) & is_finite))
    tl.store(column + count, total((tl.abs(element) == LARGEST) & is_finite))
    tl.store(column + 2 * count, total((element == 0) & (given != 0) & is_finite))
    tl.store(column + 3 * count, tl.sum(given.to(tl.float64) * given.to(tl.float64)))
    tl.store(column + 4 * count, tl.sum(noise * noise))
    tl.store(column + 5 * count, tl.sum(tl.where(is_finite, tl.where(is_counted, exponent, 0.0), float("nan"))))
    tl.store(column + 6 * count, total(is_counted))
    tl.store(column + 7 * count, tl.max(tl.where(is_counted, -exponent, float("-inf"))))
    tl.store(column + 8 * count, tl.max(tl.where(is_counted, exponent, float("-inf"))))


@triton.jit
def total(holds):
    """Return the number of true elements: float64."""
    return tl.sum(holds.to(tl.int32)).to(tl.float64)
