"""Grouped products of bf16 matrices under FP32 scales: the device side of `mxstudy.kernels.scaled_grouped_mm`."""

import triton
import triton.language as tl


@triton.jit
def scaled_grouped_mm_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    a_blocks_ptr,
    b_blocks_ptr,
    ends_ptr,
    c_ptr,
    groups,
    rows,
    columns,
    inner,
    a_down,
    a_along,
    b_group,
    b_down,
    b_along,
    a_scales_group,
    a_scales_along,
    b_scales_group,
    b_scales_along,
    a_blocks_down,
    a_blocks_along,
    b_blocks_group,
    b_blocks_down,
    b_blocks_along,
    BY_ROWS: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply bf16 matrices by groups: c, bf16 and contiguous, each sum times the scales of its row and its column.

    BY_ROWS: a group is rows of a [rows, inner], and has its own b [groups, inner, columns]; c is [rows, columns]. Else
    it is part of the inner axis of a [rows, inner] and b [inner, columns]; c is [groups, rows, columns]. BY_BLOCKS: the
    product of each DEPTH of the inner axis is multiplied by its scales of a and of b before it is added; a pointer that
    is None leaves its scales out, and groups of the inner axis begin at multiples of DEPTH. `ends`: int32, where each
    group ends. IS_WHOLE: the inner axis of each group is a multiple of DEPTH. GROUPS: a power of two, not below
    `groups`. A program without rows of a group ends at once. `group`, `down` and `along`: strides.
    """
    across = tl.cdiv(columns, WIDTH)
    tile = tl.program_id(0) // across
    if BY_ROWS:
        number = tl.arange(0, GROUPS)
        ends = tl.load(ends_ptr + number, mask=number < groups, other=0)
        starts = tl.load(ends_ptr + number - 1, mask=(number > 0) & (number < groups), other=0)
        tiles = tl.cdiv(ends - starts, HEIGHT)  # of each group
        is_before = tl.cumsum(tiles, 0) <= tile
        group = tl.sum(is_before.to(tl.int32), 0)
        tile -= tl.sum(tl.where(is_before, tiles, 0), 0)
        if group >= groups:
            return
    else:
        down = tl.cdiv(rows, HEIGHT)
        group = tile // down
        tile %= down
    end = tl.load(ends_ptr + group)
    start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    if BY_ROWS:
        row = start + tile * HEIGHT + tl.arange(0, HEIGHT)
        in_rows = row < end
        first = 0
        last = inner
        b_ptr += group.to(tl.int64) * b_group
    else:
        row = tile * HEIGHT + tl.arange(0, HEIGHT)
        in_rows = row < rows
        first = start
        last = end
        c_ptr += group.to(tl.int64) * rows * columns
    column = tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)
    in_columns = column < columns
    place = first + tl.arange(0, DEPTH)
    a = a_ptr + row.to(tl.int64)[:, None] * a_down + place.to(tl.int64)[None, :] * a_along
    b = b_ptr + place.to(tl.int64)[:, None] * b_down + column.to(tl.int64)[None, :] * b_along
    sums = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for at in range(first, last, DEPTH):
        if IS_WHOLE:
            x = tl.load(a, mask=in_rows[:, None], other=0.0)
            y = tl.load(b, mask=in_columns[None, :], other=0.0)
        else:
            inside = tl.arange(0, DEPTH) < last - at
            x = tl.load(a, mask=in_rows[:, None] & inside[None, :], other=0.0)
            y = tl.load(b, mask=inside[:, None] & in_columns[None, :], other=0.0)
        if BY_BLOCKS:
            product = tl.dot(x, y)
            if a_blocks_ptr is not None:
                of_block = a_blocks_ptr + at // DEPTH * a_blocks_along
                product *= tl.load(of_block + row.to(tl.int64) * a_blocks_down, mask=in_rows, other=0.0)[:, None]
            if b_blocks_ptr is not None:
                of_block = b_blocks_ptr + group.to(tl.int64) * b_blocks_group + at // DEPTH * b_blocks_down
                product *= tl.load(of_block + column * b_blocks_along, mask=in_columns, other=0.0)[None, :]
            sums += product
        else:
            sums = tl.dot(x, y, sums)
        a += DEPTH * a_along
        b += DEPTH * b_down
    a_scales = a_scales_ptr + group * a_scales_group + row * a_scales_along
    b_scales = b_scales_ptr + group * b_scales_group + column * b_scales_along
    of_rows = tl.load(a_scales, mask=in_rows, other=0.0)
    of_columns = tl.load(b_scales, mask=in_columns, other=0.0)
    sums *= of_rows[:, None] * of_columns[None, :]
    tl.store(
        c_ptr + row.to(tl.int64)[:, None] * columns + column[None, :],
        sums.to(tl.bfloat16),
        mask=in_rows[:, None] & in_columns[None, :],
    )
