"""The choice of a block's scale among several, by the error of its elements: `mxstudy.numerics.cast.better`, same bits.

CAST is a `CompiledCast` of mxstudy.kernels.operand_cast. A part has whole blocks; square blocks lie along the columns
of the tile, and a part holds their rows.
"""

import triton
import triton.language as tl


@triton.jit
def errors(values, scale, x, outer_ptr, CAST: tl.constexpr):
    """Return the sum of squared errors, or of magnitudes, of each block: `values` at these scales instead of x."""
    BLOCK: tl.constexpr = CAST.block
    ABSOLUTE: tl.constexpr = CAST.absolute_error
    found = ()
    for block in tl.static_range(len(scale)):
        decoding = scale[block]
        if outer_ptr is not None:
            decoding = decoding * scale_of_tensor(outer_ptr, decoding, CAST)
        of_elements = ()
        for i in tl.static_range(BLOCK):
            error = values[block * BLOCK + i] * decoding - x[block * BLOCK + i]
            of_elements += (tl.abs(error) if ABSOLUTE else error * error,)
        total = sum_by_halves(of_elements, BLOCK)
        found += (sums_of_columns(total, BLOCK) if CAST.square else total,)
    return found


@triton.jit
def scale_of_tensor(outer_ptr, like, CAST: tl.constexpr):
    """Return `numerics.cast.scale_of_result` of a tensor with that absmax, float32, in the shape of `like`."""
    outer = tl.load(outer_ptr) + tl.zeros_like(like)
    unit = tl.full(like.shape, CAST.e4m3.unit, tl.float64)
    return (outer.to(tl.float64) * unit).to(tl.float32)


@triton.jit
def sum_by_halves(x, COUNT: tl.constexpr):
    """Return the sum of COUNT tensors, first half plus second, and so on."""
    total = x
    for stage in tl.static_range(7):
        if COUNT >> stage > 1:
            sums = ()
            for i in tl.static_range(COUNT >> (stage + 1)):
                sums += (total[i] + total[i + (COUNT >> (stage + 1))],)
            total = sums
    return total[0]


@triton.jit
def sums_of_columns(x, COUNT: tl.constexpr):
    """Return the sum of each COUNT neighbours in a row, first half plus second, and so on, for every one of them."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = x.shape[1] // COUNT
    total = tl.reshape(x, (ROWS, BLOCKS, COUNT))
    for stage in tl.static_range(7):
        if COUNT >> stage > 1:
            halves = tl.reshape(total, (ROWS, BLOCKS, 2, COUNT >> (stage + 1)))
            first, second = tl.split(tl.permute(halves, (0, 1, 3, 2)))
            total = first + second
    return tl.reshape(tl.broadcast_to(total, (ROWS, BLOCKS, COUNT)), (ROWS, BLOCKS * COUNT))


@triton.jit
def better(decoded, least, others, of_others, CAST: tl.constexpr):
    """Return the decoded elements of the candidate with the smaller error in each block, and its error.

    It is the first where errors are equal, and the other where the first's is NaN.
    """
    PART: tl.constexpr = CAST.part_size
    takes_other = ()
    smaller = ()
    for block in tl.static_range(len(least)):
        takes = (of_others[block] < least[block]) | (least[block] != least[block])
        takes_other += (takes,)
        smaller += (tl.where(takes, of_others[block], least[block]),)
    chosen = ()
    for i in tl.static_range(PART):
        chosen += (tl.where(takes_other[i // CAST.block], others[i], decoded[i]),)
    return chosen, smaller
