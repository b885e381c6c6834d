"""Division by the RMS and encoding, of a float32 tile that a program holds.

x / rms has the bits of a division. It takes three operations (`division`) where numbers are NEAR, that is finite and,
if they matter, not near an end of FP32's range. Other numbers are divided.

CAST is an `EncodingConstants` of mxstudy.kernels.norm_codes.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import magnitude_bits, round_to_bf16_away, round_to_grid, scale_code
from mxstudy.kernels.device.division import quotient

# NEAR: a block's maximum is 0, or within a factor of FAR of the rms and at least 1 / FAR. Elements 2^-40 below the
# maximum are cast to 0.
FAR = tl.constexpr(2.0**60)
FARTHEST = tl.constexpr(2.0**40)  # NEAR: the rms is within this factor of 1
LEAST_EXPONENT = tl.constexpr(127 - 80)  # biased; with a scale from here on NEAR products stay in FP32's range
ANCHOR = tl.constexpr(2.0**23)  # x + ANCHOR has the nearest integer to x in its low bits, ties to even
ANCHOR_BITS = tl.constexpr(0x4B000000)
SIGNS = tl.constexpr(-0x7FFF8000)  # the sign bits of both bf16 numbers of a word: bits 15 and 31
SIGNS_TO_BYTE = tl.constexpr(2**20 + 2**8)  # the product with it / 2^32 has the signs in bits 3 and 7
E4M3_MIN_NORMAL = tl.constexpr(2.0**-6)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def divide(x, rms, inverse, NEAR: tl.constexpr, CAST: tl.constexpr):
    """Return x / rms rounded once, then to bf16 half away from zero if the cast pre-rounds. A zero keeps its sign."""
    q = quotient(x, rms, inverse) if NEAR else tl.div_rn(x, rms + tl.zeros_like(x))
    if CAST.pre_round:
        q = round_to_bf16_away(q)
    return q


@triton.jit
def encode_e8m0_scales(absmax, NEAR: tl.constexpr, FORMAT: tl.constexpr):
    """Return the scales' uint8 codes, 2^k, and 2^-k (NaN if absmax is not finite) of blocks with these maxima.

    For zeros in rows that are NEAR, 2^k is larger than the scale, so that all products with it are in FP32's range.
    """
    exponent = scale_code(magnitude_bits(absmax), FORMAT)
    code = exponent.to(tl.uint8)
    if NEAR:
        exponent = tl.maximum(exponent, LEAST_EXPONENT)
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    if not NEAR:
        finite = absmax < float("inf")
        code = tl.where(finite, code, 0xFF).to(tl.uint8)
        factor = tl.where(finite, factor, float("nan"))
    return code, (exponent << 23).to(tl.float32, bitcast=True), factor


@triton.jit
def encode_e4m3_scales(absmax, tensor_scale, NEAR: tl.constexpr):
    """Return NVFP4's scale codes, and the factor that elements are multiplied by, which is no power of two."""
    nothing = tl.zeros_like(absmax)
    scale = tl.div_rn(tl.div_rn(absmax, nothing + 6.0), nothing + tensor_scale)
    scale = tl.minimum(tl.maximum(scale, E4M3_MIN_NORMAL), E4M3_MAX).to(tl.float8e4nv)
    code = scale.to(tl.uint8, bitcast=True)
    factor = tl.div_rn(tl.div_rn(nothing + 1.0, nothing + tensor_scale), scale.to(tl.float32))
    if not NEAR:
        finite = absmax < float("inf")
        code = tl.where(finite, code, 0x7F).to(tl.uint8)
        factor = tl.where(finite, factor, float("nan"))
    return code, factor


@triton.jit
def encode_bytes(low, high, NEAR: tl.constexpr, CAST: tl.constexpr):
    """Encode float32 pairs [rows, spans, words], already divided by their scales: uint8 [rows, spans, 2 words].

    The conversion saturates.
    """
    FORMAT: tl.constexpr = CAST.format
    x = tl.reshape(tl.join(low, high), (low.shape[0], low.shape[1], 2 * low.shape[2]))
    y = x
    if CAST.away:
        y = round_to_grid(x, FORMAT, True)
    codes = y.to(CAST.element).to(tl.uint8, bitcast=True)
    if not NEAR:
        codes = tl.where(x == x, codes, 0x7F).to(tl.uint8)
    return codes


@triton.jit
def encode_e2m1(low, high, word, NEAR: tl.constexpr, CAST: tl.constexpr):
    """Encode magnitudes in E2M1 with the signs of the bf16 numbers in `word`: uint8 [rows, spans, words].

    The first of two numbers is in the low bits.
    """
    signs = word & SIGNS
    if not NEAR:
        signs = tl.where(low < float("inf"), signs, signs & -0x10000)
        signs = tl.where(high < float("inf"), signs, signs & 0xFFFF)
    signs = tl.umulhi(signs.to(tl.uint32, bitcast=True), SIGNS_TO_BYTE).to(tl.int32, bitcast=True) & 0x88
    code = code_of_e2m1(low, NEAR, CAST) + code_of_e2m1(high, NEAR, CAST) * 16
    return (code | signs).to(tl.uint8)


@triton.jit
def code_of_e2m1(m, NEAR: tl.constexpr, CAST: tl.constexpr):
    """Return the E2M1 codes of magnitudes m, in the last byte of an int32.

    A code is m over the step of its binade, 0.5, 1 or 2, plus 0, 2 or 4: the least of the three. Each is a sum with the
    anchor, rounded once to an integer; the anchor's last byte is 0. No sum is negative, so their bits compare as they
    do.
    """
    FORMAT: tl.constexpr = CAST.format
    finite = m < float("inf")
    if CAST.away:
        m = round_to_grid(m, FORMAT, True)
    least = tl.minimum(bits(tl.fma(m, 2.0, ANCHOR)), bits(m + (ANCHOR + 2.0)))
    least = tl.minimum(least, bits(tl.fma(m, 0.5, ANCHOR + 4.0)))
    if FORMAT.limit is not None:
        least = tl.minimum(least, ANCHOR_BITS + 7)
    return least if NEAR else tl.where(finite, least, 7)


@triton.jit
def bits(x):
    return x.to(tl.int32, bitcast=True)


ELEMENTS = {"E4M3": tl.float8e4nv, "E5M2": tl.float8e5, "E2M1": None, "NVFP4": None}
