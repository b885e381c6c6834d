"""The cast of bf16 values, two in an int32 word: the bits of `cast_both` in three fifths of its instructions.

A value over its block's scale is exact in bf16, or too small to matter, and so is the sum with an anchor that rounds it
to the grid; a product with a power of two rounds nothing but what bf16 cannot hold. So nothing is converted between
formats, and every instruction works on two numbers. It needs bf16 arithmetic that rounds once, subnormals included
(compute capability 9.0), and rounding half to even.

FORMAT is a `FormatConstants` of mxstudy.kernels.operators.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.pairs import MAGNITUDES, TWICE, larger, sums_up_to

EXPONENTS = tl.constexpr(0x7F807F80)
INVERSE = tl.constexpr(0x7F00)  # minus the bits of 2^k: those of 2^-k
LEAST_SCALE = tl.constexpr(0x0040)  # 2^-127
MANTISSA = tl.constexpr(7)
BINADE = tl.constexpr(128)  # bf16 bit patterns per binade
PACK = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
LARGEST = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
# The scale, or NaN if the largest magnitude is not finite.
POISON = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $2; }")
# x is the word over the scale, clipped if it must be, and the anchor is max(binade of x + $4, $5). The result is
# x + anchor - anchor, times the scale, with the word's signs. A product plus -0 is that product.
SCALE = """{
    .reg .b32 nothing, one, minus, x, a;
    mov.b32 nothing, 0x80008000;
    mov.b32 one, 0x3F803F80;
    mov.b32 minus, 0xBF80BF80;
    fma.rn.bf16x2 x, $1, $2, nothing;
"""
CLIP = """
    and.b32 x, x, 0x7FFF7FFF;
    min.s16x2 x, x, $6;
"""
ROUND = """
    and.b32 a, x, 0x7F807F80;
    add.s16x2 a, a, $4;
    max.s16x2 a, a, $5;
    fma.rn.bf16x2 x, x, one, a;
    fma.rn.bf16x2 x, a, minus, x;
    fma.rn.bf16x2 x, x, $3, nothing;
    lop3.b32 $0, x, $1, 0x7FFF7FFF, 0xE4;
}"""
SCALE_ROUND = tl.constexpr(SCALE + ROUND)
SCALE_CLIP_ROUND = tl.constexpr(SCALE + CLIP + ROUND)


@triton.jit
def cast_pairs(x, AXIS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Return x [R, C] float32, rounded to bf16, quantised in blocks along AXIS and decoded: bf16 [R, C]."""
    ROWS: tl.constexpr = x.shape[0]
    WORDS: tl.constexpr = x.shape[1] // 2
    words = paired(x)
    if AXIS == 0:
        blocks = tl.reshape(words, (ROWS // BLOCK, BLOCK, WORDS))
    else:
        blocks = tl.reshape(words, (ROWS, 2 * WORDS // BLOCK, BLOCK // 2))
    most = tl.reduce(blocks, AXIS + 1, larger_magnitude, keep_dims=True) & MAGNITUDES
    if AXIS == 1:
        most = larger(most, (most << 16) | (most >> 16))
    inverse, scale = scales_of_pairs(most, FORMAT)
    return unpaired(tl.reshape(round_pairs(blocks, inverse, scale, FORMAT), (ROWS, WORDS)))


@triton.jit
def scales_of_pairs(most, FORMAT: tl.constexpr):
    """Return 2^-k and 2^k, pairs, of blocks with these largest magnitudes; 2^k is NaN where one is not finite."""
    RULE: tl.constexpr = FORMAT.rule >> 16  # what is below it would never carry: the bits there are 0
    EMAX: tl.constexpr = FORMAT.emax * BINADE
    exponent = sums_up_to((most + RULE * TWICE) & EXPONENTS, pairs_of(-EMAX, most), 0x7F80)
    scale = larger(exponent, pairs_of(LEAST_SCALE, most))
    scale = tl.inline_asm_elementwise(POISON, "=r,r,r", [most, scale], dtype=tl.int32, is_pure=True, pack=1)
    inverse = pairs_of(INVERSE, most) - exponent
    if FORMAT.emax < 2:  # of E1M2 alone k may be 127
        inverse = larger(inverse, pairs_of(LEAST_SCALE, most))
    return inverse, scale


@triton.jit
def round_pairs(words, inverse, scale, FORMAT: tl.constexpr):
    """Return words of bf16 pairs rounded to the grid at their blocks' scales.

    The anchor is 1.5 times a power of two that makes the sum's last place a step of the grid.
    """
    STEPS: tl.constexpr = (MANTISSA - FORMAT.mantissa_bits) * BINADE + BINADE // 2
    LEAST: tl.constexpr = (FORMAT.least_normal >> 16) + STEPS
    words, inverse = tl.broadcast(words, inverse)
    words, scale = tl.broadcast(words, scale)
    arguments = [words, inverse, scale, pairs_of(STEPS, words), pairs_of(LEAST, words)]
    if FORMAT.limit is None:
        found = tl.inline_asm_elementwise(SCALE_ROUND, "=r,r,r,r,r,r", arguments, tl.int32, is_pure=True, pack=1)
    else:
        limit = tl.full(words.shape, FORMAT.limit, tl.float32).to(tl.int32, bitcast=True)
        arguments += [limit | (limit >> 16)]
        found = tl.inline_asm_elementwise(SCALE_CLIP_ROUND, "=r,r,r,r,r,r,r", arguments, tl.int32, is_pure=True, pack=1)
    return found


@triton.jit
def pairs_of(HALF: tl.constexpr, like):
    """Return words of the shape of `like` whose halves both have these bits, a signed number."""
    return tl.full(like.shape, HALF * 2**16 + (HALF & 0xFFFF), tl.int32)


@triton.jit
def paired(x):
    """Return x [R, C] float32 rounded to bf16, two neighbours in a word: int32 [R, C / 2]."""
    low, high = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.inline_asm_elementwise(PACK, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def unpaired(words):
    """Return the bf16 numbers [R, C] of words [R, C / 2]."""
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low, high), (words.shape[0], 2 * words.shape[1]))


@triton.jit
def larger_magnitude(x, y):
    """Return the larger magnitude of each position, with some sign, or NaN if one is NaN."""
    return tl.inline_asm_elementwise(LARGEST, "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1)
