"""Residual sum, norm and both casts: one program has all columns of some rows (of a row of blocks if it casts columns).

A first pass over tiles of columns gathers what the norm needs of each row, a second pass normalises and casts. A tile
as wide as the matrix stays in registers; otherwise the second pass reads it from the caches.

Rows are summed tile after tile, a tile by `tl.sum` over its width. That order follows from tile and warps, which
COLUMNS, BLOCK and the kind of cast determine: neither the number of rows nor a row's position changes a bit of its RMS.

NORM is a `NormConstants` of mxstudy.kernels.norm_cast.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import magnitude_bits, store_both


@triton.jit
def norm_cast_both_kernel(
    x_ptr,
    branch_ptr,
    gain_ptr,
    bias_ptr,
    total_ptr,
    row_ptr,
    column_ptr,
    mean_ptr,
    rms_ptr,
    rows,
    gain_stride,
    GATHER: tl.constexpr,
    MERGE: tl.constexpr,
    FINISH: tl.constexpr,
    NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Normalise and cast x + branch [replicas, rows, COLUMNS].

    gain and bias: [COLUMNS], or one per replica, gain_stride apart. A None pointer leaves out its step or result:
    branch with total, gain, bias, mean, an operand.
    """
    TILE_COLUMNS: tl.constexpr = TILE.columns
    BLOCK: tl.constexpr = CAST.block
    row = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    replica = tl.program_id(1).to(tl.int64)
    mask = row[:, None] < rows
    index = replica * rows + row
    offsets = index[:, None] * COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]

    tile = load_sum(x_ptr, branch_ptr, total_ptr, offsets, mask)
    a, b = GATHER(tile, BLOCK, NORM)
    for start in range(TILE_COLUMNS, COLUMNS, TILE_COLUMNS):
        c, d = GATHER(load_sum(x_ptr, branch_ptr, total_ptr, offsets + start, mask), BLOCK, NORM)
        a, b = MERGE(a, b, c, d, start, TILE_COLUMNS, NORM)
    mean, rms = FINISH(a, b, COLUMNS, BLOCK, NORM)
    tl.store(rms_ptr + index, rms, mask=row < rows)
    if mean_ptr is not None:
        tl.store(mean_ptr + index, mean, mask=row < rows)

    if branch_ptr is not None:
        summed_ptr = total_ptr
        tl.debug_barrier()  # values that other threads of this program have written are read below
    else:
        summed_ptr = x_ptr
    for start in range(0, COLUMNS, TILE_COLUMNS):
        if TILE_COLUMNS != COLUMNS:
            tile = tl.load(summed_ptr + offsets + start, mask=mask, other=0.0).to(tl.float32)
        y = tl.div_rn(tile - mean[:, None], rms[:, None] + tl.zeros_like(tile))
        if gain_ptr is not None:
            feature = replica * gain_stride + start + tl.arange(0, TILE_COLUMNS)[None, :]
            y = y * tl.load(gain_ptr + feature).to(tl.float32)
            if bias_ptr is not None:
                y = y + tl.load(bias_ptr + feature).to(tl.float32)
        store_both(y, row_ptr, column_ptr, offsets + start, mask, NORM.round_output, CAST)


@triton.jit
def load_sum(x_ptr, branch_ptr, total_ptr, offsets, mask):
    """Return x, or x + branch rounded to x's dtype and stored in total: float32."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if branch_ptr is not None:
        branch = tl.load(branch_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        total = (x + branch).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)
    return x


# A norm is three functions on a pair of numbers per row: gather a tile's pair, merge two neighbours' pairs, and finish,
# which returns mean and RMS from the last pair.


@triton.jit
def gather_squares(x, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Return zeros, and the sum of squares."""
    return tl.zeros((x.shape[0],), tl.float32), tl.sum(x * x, axis=1)


@triton.jit
def merge_squares(a, b, c, d, SEEN, NEW: tl.constexpr, NORM: tl.constexpr):
    """Add this chunk's squares to the running sum; the mean stays 0."""
    return a, b + d


@triton.jit
def finish_squares(a, b, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Return the mean `a`, and the RMS from the sum of squares, or of squared deviations, `b`."""
    return a, tl.sqrt_rn(b / COLUMNS + NORM.eps)


@triton.jit
def gather_deviations(x, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Return the mean, and the sum of squared deviations from it."""
    mean = tl.sum(x, axis=1) / x.shape[1]
    deviation = x - mean[:, None]
    return mean, tl.sum(deviation * deviation, axis=1)


@triton.jit
def merge_deviations(a, b, c, d, SEEN, NEW: tl.constexpr, NORM: tl.constexpr):
    """Merge the pair of SEEN columns with that of NEW columns (Chan, Golub and LeVeque 1979)."""
    share = NEW / (SEEN + NEW)
    difference = c - a
    return a + difference * share, b + d + difference * difference * (share * SEEN)


@triton.jit
def power(x, P: tl.constexpr):
    """Return x^P for x >= 0."""
    if P == 1:
        y = x
    elif P == 2:
        y = x * x
    else:
        y = tl.exp2(P * tl.log2(x))
    return y


@triton.jit
def root(x, P: tl.constexpr):
    """Return x^(1 / P)."""
    return tl.sqrt_rn(x) if P == 2 else power(x, 1 / P)


@triton.jit
def relative(bits, largest_bits):
    """Return a / b for magnitudes a <= b given as bits; 0 / 0 gives 0."""
    largest = tl.where(largest_bits == 0, 1.0, largest_bits.to(tl.float32, bitcast=True))
    return tl.div_rn(bits.to(tl.float32, bitcast=True), largest)


@triton.jit
def gather_block_maxima(x, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Return the bits of the largest magnitude, and the sum over blocks of (absmax / largest)^p."""
    ROWS: tl.constexpr = x.shape[0]
    blocks = tl.reshape(magnitude_bits(x), (ROWS, x.shape[1] // BLOCK, BLOCK))
    absmax = tl.max(blocks, axis=2)
    largest = tl.max(absmax, axis=1)
    ratios = relative(absmax, largest[:, None] + tl.zeros_like(absmax))
    return largest, tl.sum(power(ratios, NORM.p), axis=1)


@triton.jit
def merge_block_maxima(a, b, c, d, SEEN, NEW: tl.constexpr, NORM: tl.constexpr):
    largest = tl.maximum(a, c)
    return largest, b * power(relative(a, largest), NORM.p) + d * power(relative(c, largest), NORM.p)


@triton.jit
def finish_block_maxima(a, b, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Return a mean of 0 and MXNorm's RMS (MXNorm paper, Eq. 5 and 8)."""
    largest = a.to(tl.float32, bitcast=True)
    return tl.zeros_like(largest), NORM.coefficient * root(b / (COLUMNS // BLOCK), NORM.p) * largest + NORM.eps


EXACT = (gather_squares, merge_squares, finish_squares)
CENTERED = (gather_deviations, merge_deviations, finish_squares)
BLOCK_MAXIMA = (gather_block_maxima, merge_block_maxima, finish_block_maxima)
