"""Products of bf16 matrices with FP32 scales: the device side of `mxstudy.kernels.matmul_blocks`."""

import triton
import triton.language as tl


@triton.jit
def matmul_blocks_kernel(
    a_ptr,
    b_ptr,
    a_scales_ptr,
    b_scales_ptr,
    scale_ptr,
    c_ptr,
    rows,
    columns,
    a_down,
    a_along,
    b_down,
    b_along,
    a_scales_down,
    a_scales_along,
    b_scales_down,
    b_scales_along,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Multiply a [rows, INNER] by b [INNER, columns], bf16: c [rows, columns], bf16 and contiguous.

    The product of each BLOCK of the inner axis is multiplied by its scales of a [rows, blocks] and of b [blocks,
    columns], the sum of all by the one scale; a pointer that is None leaves its scales out. `down` and `along`: a
    matrix's strides.
    """
    across = tl.cdiv(columns, WIDTH)
    row = tl.program_id(0) // across * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)
    place = tl.arange(0, BLOCK)
    in_rows = row < rows
    in_columns = column < columns
    a = a_ptr + row.to(tl.int64)[:, None] * a_down + place[None, :] * a_along
    b = b_ptr + place[:, None] * b_down + column.to(tl.int64)[None, :] * b_along
    sums = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for first in range(0, INNER, BLOCK):
        if INNER % BLOCK == 0:
            x = tl.load(a, mask=in_rows[:, None], other=0.0)
            y = tl.load(b, mask=in_columns[None, :], other=0.0)
        else:
            inside = place < INNER - first
            x = tl.load(a, mask=in_rows[:, None] & inside[None, :], other=0.0)
            y = tl.load(b, mask=inside[:, None] & in_columns[None, :], other=0.0)
        product = tl.dot(x, y)
        if a_scales_ptr is not None:
            of_block = a_scales_ptr + first // BLOCK * a_scales_along
            product *= tl.load(of_block + row * a_scales_down, mask=in_rows, other=0.0)[:, None]
        if b_scales_ptr is not None:
            of_block = b_scales_ptr + first // BLOCK * b_scales_down
            product *= tl.load(of_block + column * b_scales_along, mask=in_columns, other=0.0)[None, :]
        sums += product
        a += BLOCK * a_along
        b += BLOCK * b_down
    if scale_ptr is not None:
        sums *= tl.load(scale_ptr)
    tl.store(
        c_ptr + row.to(tl.int64)[:, None] * columns + column[None, :],
        sums.to(tl.bfloat16),
        mask=in_rows[:, None] & in_columns[None, :],
    )
