"""What a norm's output is like, measured in one pass over the norm's input: the output is never stored.

The output is x / rms, quantised in blocks along the row if there is a format. RMS and output are computed with the
functions of `norm_cast`, tile after tile, so they have the same bits. NORM, TILE and CAST are as there.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import in_blocks, magnitude_bits, round_to_bf16_away, round_to_grid, scales
from mxstudy.kernels.device.norm_cast import gather_squares, load_sum

MANTISSA_BITS, MANTISSA_MASK, BIAS = tl.constexpr(23), tl.constexpr(0x7FFFFF), tl.constexpr(127)


@triton.jit
def norm_squares_kernel(
    x_ptr,
    squares_ptr,
    rows,
    GATHER: tl.constexpr,
    MERGE: tl.constexpr,
    FINISH: tl.constexpr,
    NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Write the mean square of each row's output, and of what the exact norm's would be: float32 [2, rows]."""
    ROWS: tl.constexpr = TILE.rows
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    mean, rms, square = statistics(x_ptr, row, mask, GATHER, MERGE, FINISH, NORM, COLUMNS, TILE, CAST)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, COLUMNS, TILE.columns):
        y = output(load_tile(x_ptr, row, mask, start, COLUMNS, TILE), mean, rms, CAST)
        total += tl.sum(y * y, axis=1)
    tl.store(squares_ptr + row, total / COLUMNS, mask=mask)
    tl.store(squares_ptr + rows + row, square / (square + NORM.eps), mask=mask)


@triton.jit
def norm_bins_kernel(
    x_ptr,
    counts_ptr,
    rows,
    GATHER: tl.constexpr,
    MERGE: tl.constexpr,
    FINISH: tl.constexpr,
    NORM: tl.constexpr,
    BINS: tl.constexpr,
    TURNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Write each program's histograms of input and output over TURNS tiles of rows: int32 [programs, 2, SIZE].

    BINS: a `Bins` of mxstudy.kernels.norm_outputs. The last of its SIZE bins takes rows that do not exist.
    """
    SIZE: tl.constexpr = BINS.size
    ROWS: tl.constexpr = TILE.rows
    inputs = tl.zeros((SIZE,), tl.int32)
    outputs = tl.zeros((SIZE,), tl.int32)
    for turn in range(TURNS):
        row = (turn * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        mask = row < rows
        mean, rms, _ = statistics(x_ptr, row, mask, GATHER, MERGE, FINISH, NORM, COLUMNS, TILE, CAST)
        for start in range(0, COLUMNS, TILE.columns):
            tile = load_tile(x_ptr, row, mask, start, COLUMNS, TILE)
            inputs += histogram(tile, mask, BINS)
            outputs += histogram(output(tile, mean, rms, CAST), mask, BINS)
    place = counts_ptr + tl.program_id(0) * 2 * SIZE + tl.arange(0, SIZE)
    tl.store(place, inputs)
    tl.store(place + SIZE, outputs)


@triton.jit
def load_tile(x_ptr, row, mask, start, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Return columns from `start` on of these rows, float32 [rows, columns]; rows that do not exist are zeros."""
    offsets = row.to(tl.int64)[:, None] * COLUMNS + start + tl.arange(0, TILE.columns)[None, :]
    return load_sum(x_ptr, None, None, offsets, mask[:, None])


@triton.jit
def statistics(
    x_ptr,
    row,
    mask,
    GATHER: tl.constexpr,
    MERGE: tl.constexpr,
    FINISH: tl.constexpr,
    NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Return mean, RMS and mean square of the (centred) rows, float32 [rows]."""
    BLOCK: tl.constexpr = CAST.block
    tile = load_tile(x_ptr, row, mask, 0, COLUMNS, TILE)
    a, b = GATHER(tile, BLOCK, NORM)
    _, squares = gather_squares(tile, BLOCK, NORM)
    for start in range(TILE.columns, COLUMNS, TILE.columns):
        tile = load_tile(x_ptr, row, mask, start, COLUMNS, TILE)
        c, d = GATHER(tile, BLOCK, NORM)
        a, b = MERGE(a, b, c, d, start, TILE.columns, NORM)
        _, more = gather_squares(tile, BLOCK, NORM)
        squares += more
    if NORM.p is None:
        squares = b
    mean, rms = FINISH(a, b, COLUMNS, BLOCK, NORM)
    return mean, rms, squares / COLUMNS


@triton.jit
def output(x, mean, rms, CAST: tl.constexpr):
    """Return the norm's output of x [R, C], quantised and decoded if the cast has a format: float32."""
    FORMAT: tl.constexpr = CAST.row
    BLOCK: tl.constexpr = CAST.block
    y = tl.div_rn(x - mean[:, None], rms[:, None] + tl.zeros_like(x))
    if FORMAT is not None:
        if CAST.pre_round:
            y = round_to_bf16_away(y)
        blocks = in_blocks(y, 1, BLOCK)
        inverse, scale = scales(tl.max(magnitude_bits(blocks), axis=2, keep_dims=True), FORMAT)
        y = tl.reshape(round_to_grid(blocks * inverse, FORMAT, CAST.away) * scale, (x.shape[0], x.shape[1]))
    return y


@triton.jit
def histogram(x, mask, BINS: tl.constexpr):
    """Return the number of elements of x [R, C] in each bin, int32 [SIZE], as `probes.activations.bins_of` has them."""
    STARTS: tl.constexpr = BINS.starts
    SIZE: tl.constexpr = BINS.size
    EDGES: tl.constexpr = BINS.edges
    bits = x.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF) - (bits < 0).to(tl.int32)
    within = tl.zeros_like(bits)
    for i in tl.static_range(len(STARTS)):
        within += ((magnitude & MANTISSA_MASK) >= STARTS[i]).to(tl.int32)
    octave = (magnitude >> MANTISSA_BITS) - BIAS - BINS.smallest_exponent
    from_middle = tl.minimum(tl.maximum(BINS.per_octave * octave + within + 1, 0), EDGES)
    found = EDGES + tl.where(bits < 0, -from_middle, from_middle)
    found = tl.where(mask[:, None], found, SIZE - 1)
    return tl.histogram(tl.reshape(found, (x.shape[0] * x.shape[1],)), SIZE)
