"""Pairs of 16-bit values in an int32 word: bf16 numbers, or integers for DPX (compute capability 9.0)."""

import triton
import triton.language as tl

MAGNITUDES = tl.constexpr(0x7FFF7FFF)  # mask of the magnitudes of two bf16 numbers
TWICE = tl.constexpr(0x10001)  # a small number times this is a pair of that number
SUMS = tl.constexpr("{ .reg .b32 sum; add.s16x2 sum, $1, $2; min.s16x2.relu $0, sum, $3; }")
LARGER = tl.constexpr("max.s16x2 $0, $1, $2;")
# In assembly, because LLVM would keep magnitudes that are used twice, in as many registers as there are words.
WITHOUT_SIGNS = tl.constexpr("and.b32 $0, $1, 0x7FFF7FFF;")
# Four words at once: take the second byte of each number, the second of a pair first; set bit 3 where there is a sign;
# join two half bytes.
HALF_BYTES = tl.constexpr("""{
    .reg .b32 a, b, s, t;
    prmt.b32 a, $1, $2, 0x5713;
    prmt.b32 b, $3, $4, 0x5713;
    prmt.b32 s, $5, $6, 0xDF9B;
    prmt.b32 t, $7, $8, 0xDF9B;
    and.b32 s, s, 0x08080808;
    and.b32 t, t, 0x08080808;
    or.b32 a, a, s;
    or.b32 b, b, t;
    mul.lo.u32 a, a, 0x1001;
    mul.lo.u32 b, b, 0x1001;
    prmt.b32 $0, a, b, 0x7531;
}""")


@triton.jit
def numbers(word):
    """Return the first and the second of a word's bf16 numbers, as float32."""
    low, high = word << 16, word & -0x10000
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def sums_up_to(x, y, most: tl.constexpr):
    """Sum the pairs x and y, each sum clipped to 0..most."""
    x, y = tl.broadcast(x, y)
    limit = tl.full(x.shape, most * TWICE, tl.int32)
    return tl.inline_asm_elementwise(SUMS, "=r,r,r,r", [x, y, limit], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def larger(x, y):
    """Return the larger number of each position in two words of integer pairs."""
    return tl.inline_asm_elementwise(LARGER, "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def magnitudes(x):
    """Return pairs of bf16 numbers without their signs."""
    return tl.inline_asm_elementwise(WITHOUT_SIGNS, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def largest_magnitude(x, y):
    """Return the largest magnitude of x and y, bf16 pairs [rows, spans, 4]: int32 [rows, spans], upper half."""
    most = larger(magnitudes(x), magnitudes(y))
    first, second = tl.split(tl.reshape(most, (most.shape[0], most.shape[1], 2, 2)))
    first, second = tl.split(larger(first, second))
    most = larger(first, second)
    return tl.maximum(most, most << 16)


@triton.jit
def half_bytes(x, signs):
    """Return a pair's second bytes, below 8, with another pair's signs in bit 3: uint8, the first in the low bits."""
    registers: tl.constexpr = "=r,r,r,r,r,r,r,r,r"
    return tl.inline_asm_elementwise(HALF_BYTES, registers, [x, signs], dtype=tl.uint8, is_pure=True, pack=4)
