"""Two 16 bits in a word, int32: bf16 numbers, or integers, which GPUs of compute capability 9.0 take at once (DPX)."""

import triton
import triton.language as tl

MAGNITUDES = tl.constexpr(0x7FFF7FFF)  # of two bf16 numbers
TWICE = tl.constexpr(0x10001)  # a product with it has a small number twice
SUMS = tl.constexpr("{ .reg .b32 sum; add.s16x2 sum, $1, $2; min.s16x2.relu $0, sum, $3; }")
LARGER = tl.constexpr("max.s16x2 $0, $1, $2;")
# LLVM would keep magnitudes that it sees twice, in as many registers as there are words.
WITHOUT_SIGNS = tl.constexpr("and.b32 $0, $1, 0x7FFF7FFF;")
# Of four words at once: second bytes, the second of a pair first; ones where a sign is; two half bytes side by side.
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
    """The first and the second of a word's bf16 numbers, as float32."""
    low, high = word << 16, word & -0x10000
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def sums_up_to(x, y, most: tl.constexpr):
    """Of both, not below 0 and not above `most`."""
    x, y = tl.broadcast(x, y)
    limit = tl.full(x.shape, most * TWICE, tl.int32)
    return tl.inline_asm_elementwise(SUMS, "=r,r,r,r", [x, y, limit], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def larger(x, y):
    return tl.inline_asm_elementwise(LARGER, "=r,r,r", [x, y], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def magnitudes(x):
    """Of pairs of bf16 numbers."""
    return tl.inline_asm_elementwise(WITHOUT_SIGNS, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def largest_magnitude(x, y):
    """Of bf16 numbers, pairs [rows, spans, 4] twice: in the upper half of an int32 [rows, spans]."""
    most = larger(magnitudes(x), magnitudes(y))
    first, second = tl.split(tl.reshape(most, (most.shape[0], most.shape[1], 2, 2)))
    first, second = tl.split(larger(first, second))
    most = larger(first, second)
    return tl.maximum(most, most << 16)


@triton.jit
def half_bytes(x, signs):
    """A pair's second bytes, less than 8, with the signs of another pair in bit 3: uint8, the first in the low bits."""
    registers: tl.constexpr = "=r,r,r,r,r,r,r,r,r"
    return tl.inline_asm_elementwise(HALF_BYTES, registers, [x, signs], dtype=tl.uint8, is_pure=True, pack=4)
