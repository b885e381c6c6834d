"""The cast of a float32 tile that a program holds: `numerics.scales` and `numerics.grid` on the device, same bits.

TILE, CAST and FORMAT are a `Tile`, a `CastConstants` and a `FormatConstants` of mxstudy.kernels.operators. Blocks lie
along an axis of the tile and are whole in it. No result depends on how a tile is spread over threads: maxima are exact,
and everything else is elementwise.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_pairs import cast_pairs

MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
SIGN_MASK = tl.constexpr(-0x80000000)
EXPONENT_MASK = tl.constexpr(0x7F800000)  # also the bits of infinity
NAN_BITS = tl.constexpr(0x7FC00000)
HALF_MIN_NORMAL_BITS = tl.constexpr(0x00400000)  # 2^-127: the scale of code 0


@triton.jit
def cast_both_kernel(x_ptr, row_ptr, column_ptr, COLUMNS: tl.constexpr, TILE: tl.constexpr, CAST: tl.constexpr):
    """Cast x [rows, COLUMNS], float32 or bf16, for the contraction along the rows and along the columns: bf16."""
    offsets = tile_offsets(COLUMNS, COLUMNS, TILE)
    x = tl.load(x_ptr + offsets)
    store_both(x.to(tl.float32), row_ptr, column_ptr, offsets, None, x.dtype == tl.bfloat16, CAST)


@triton.jit
def cast_one_kernel(
    x_ptr,
    mean_ptr,
    rms_ptr,
    gain_ptr,
    bias_ptr,
    operand_ptr,
    ROUND_FIRST: tl.constexpr,
    AXIS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Cast (x - mean) / rms * gain + bias of x [rows, COLUMNS] to one bf16 operand; a None pointer skips its step."""
    across: tl.constexpr = COLUMNS // TILE.columns
    row = (tl.program_id(0) // across).to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)[:, None]
    column = tl.program_id(0) % across * TILE.columns + tl.arange(0, TILE.columns)[None, :]
    offsets = row * COLUMNS + column
    x = through_bf16(tl.load(x_ptr + offsets).to(tl.float32), ROUND_FIRST)
    ALONE: tl.constexpr = mean_ptr is None and rms_ptr is None and gain_ptr is None
    IS_BF16: tl.constexpr = ALONE and (ROUND_FIRST or x_ptr.dtype.element_ty == tl.bfloat16)
    if mean_ptr is not None:
        x = x - tl.load(mean_ptr + row)
    if rms_ptr is not None:
        x = tl.div_rn(x, tl.load(rms_ptr + row) + tl.zeros_like(x))
    if gain_ptr is not None:
        x = x * tl.load(gain_ptr + column).to(tl.float32)
        if bias_ptr is not None:
            x = x + tl.load(bias_ptr + column).to(tl.float32)
    tl.store(operand_ptr + offsets, operand(x, AXIS, IS_BF16, CAST))


@triton.jit
def tile_offsets(COLUMNS: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr):
    """Return the int64 offsets of this program's tile, out of COLUMNS columns, in a matrix with rows STRIDE apart."""
    program = tl.program_id(0).to(tl.int64)
    across: tl.constexpr = COLUMNS // TILE.columns
    first = program // across * TILE.rows * STRIDE + program % across * TILE.columns
    return first + (tl.arange(0, TILE.rows)[:, None] * STRIDE + tl.arange(0, TILE.columns)[None, :])


@triton.jit
def store_both(x, row_ptr, column_ptr, offsets, mask, ROUND: tl.constexpr, CAST: tl.constexpr):
    """Store x [R, C] float32 cast in blocks along the rows and in blocks along the columns, each decoded to bf16.

    A pointer that is None leaves its operand out. ROUND: round x to bf16 before it is cast.
    """
    if row_ptr is not None:
        tl.store(row_ptr + offsets, operand(x, 1, ROUND, CAST), mask=mask)
    if column_ptr is not None:
        tl.store(column_ptr + offsets, operand(x, 0, ROUND, CAST), mask=mask)


@triton.jit
def operand(x, AXIS: tl.constexpr, ROUND: tl.constexpr, CAST: tl.constexpr):
    """Return x [R, C] float32 quantised in blocks along AXIS and decoded to bf16, or rounded to it without a format.

    ROUND: round x to bf16 first.
    """
    FORMAT: tl.constexpr = CAST.column if AXIS == 0 else CAST.row
    BLOCK: tl.constexpr = CAST.block
    if FORMAT is not None and ROUND and CAST.pairs and x.shape[1] > 1:
        x = cast_pairs(x, AXIS, BLOCK, FORMAT)
    elif FORMAT is not None:
        x = through_bf16(x, ROUND)
        if CAST.pre_round:
            x = round_to_bf16_away(x)
        blocks = in_blocks(x, AXIS, BLOCK)
        bits = tl.max(magnitude_bits(blocks), axis=AXIS + 1, keep_dims=True)
        inverse, scale = scales(bits, FORMAT)
        x = tl.reshape(round_to_grid(blocks * inverse, FORMAT, CAST.away) * scale, (x.shape[0], x.shape[1]))
    return x.to(tl.bfloat16)


@triton.jit
def in_blocks(x, AXIS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a tile [R, C] with the elements of a block on an axis of their own, AXIS + 1."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    if AXIS == 0:
        blocks = tl.reshape(x, (ROWS // BLOCK, BLOCK, COLUMNS))
    else:
        blocks = tl.reshape(x, (ROWS, COLUMNS // BLOCK, BLOCK))
    return blocks


@triton.jit
def magnitude_bits(x):
    """Return integers that order as |x| does, NaN last."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE_MASK


@triton.jit
def scales(bits, FORMAT: tl.constexpr):
    """Return 2^-k and 2^k, float32, of blocks with these absmax bits; 2^k is NaN where absmax is not finite."""
    code = scale_code(bits, FORMAT)
    inverse = (254 - code) << 23
    if FORMAT.emax < 2:  # of E1M2 alone k may be 127
        inverse = tl.maximum(inverse, HALF_MIN_NORMAL_BITS)
    scale = tl.maximum(code << 23, HALF_MIN_NORMAL_BITS)
    inverse = inverse.to(tl.float32, bitcast=True)
    return inverse, tl.where(bits >= EXPONENT_MASK, NAN_BITS, scale).to(tl.float32, bitcast=True)


@triton.jit
def scale_code(bits, FORMAT: tl.constexpr):
    """Return k + 127, int32, at most 255 - emax, of blocks with these absmax bits, which must be finite."""
    return tl.maximum(((bits + FORMAT.rule) >> 23) - FORMAT.emax, 0)


@triton.jit
def round_to_grid(v, FORMAT: tl.constexpr, AWAY: tl.constexpr):
    """Round v float32 to the nearest element value; garbage for a NaN or an infinity, whose block's scale is NaN."""
    CONVERTED: tl.constexpr = FORMAT.converted
    if CONVERTED == "E4M3" and not AWAY:  # convert there and back, two numbers per instruction
        rounded = v.to(tl.float8e4nv).to(tl.float32)
    elif CONVERTED == "E5M2" and not AWAY:
        rounded = v.to(tl.float8e5).to(tl.float32)
    else:
        rounded = round_by_sums(v, FORMAT, AWAY)
    return rounded


@triton.jit
def round_by_sums(v, FORMAT: tl.constexpr, AWAY: tl.constexpr):
    """Round v by adding and subtracting an anchor of 2^23 steps of the grid at |v|.

    The step is the sum's last place, so the addition rounds half to even.
    """
    magnitude = tl.abs(v)
    if FORMAT.limit is not None:
        magnitude = tl.minimum(magnitude, FORMAT.limit)
    binade = tl.maximum(magnitude.to(tl.int32, bitcast=True) & EXPONENT_MASK, FORMAT.least_normal)
    anchor = (binade + ((23 - FORMAT.mantissa_bits) << 23)).to(tl.float32, bitcast=True)
    rounded = (magnitude + anchor) - anchor
    if AWAY:
        rounded = tl.where(magnitude - rounded == anchor * 2.0**-24, rounded + anchor * 2.0**-23, rounded)
    sign = v.to(tl.int32, bitcast=True) & SIGN_MASK
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_to_bf16_away(x):
    """Round float32 to the nearest bf16 value, ties away from zero; NaN and infinities stay."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(magnitude_bits(x) < EXPONENT_MASK, rounded, x)


@triton.jit
def through_bf16(x, ROUND: tl.constexpr):
    """Return x float32, rounded to bf16 values if ROUND."""
    if ROUND:
        x = x.to(tl.bfloat16).to(tl.float32)
    return x
