"""Division by the RMS and encoding, of a tile that a program holds in float32.

x / rms is that of a division, in three operations where they give its bits (`division`). That needs finite numbers, and
none that matters near an end of FP32's range: NEAR. Anything else is divided.

CAST is a `Cast` of mxstudy.kernels.norm_codes.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import magnitude_bits, round_to_bf16_away, round_to_grid, scale_code
from mxstudy.kernels.device.division import quotient

FAR = tl.constexpr(2.0**60)  # of a block's maximum from the rms, and from 1 down; elements 2^-40 below it are cast to 0
FARTHEST = tl.constexpr(2.0**40)  # of the rms from 1
LEAST_EXPONENT = tl.constexpr(127 - 80)  # of a scale with what is no farther, and with rms times it, in FP32's range
ANCHOR = tl.constexpr(2.0**23)  # the sum with it has the nearest integer in its low bits, ties to even
ANCHOR_BITS = tl.constexpr(0x4B000000)
SIGNS = tl.constexpr(-0x7FFF8000)  # of both bf16 numbers of a word: bits 15 and 31
SIGNS_TO_BYTE = tl.constexpr(2**20 + 2**8)  # a product with it over 2^32 has them in bits 3 and 7
E4M3_MIN_NORMAL = tl.constexpr(2.0**-6)
E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def divide(x, rms, inverse, NEAR: tl.constexpr, CAST: tl.constexpr):
    """x / rms rounded once, and to bf16 half away from zero after that where PRE_ROUND. A zero keeps its sign."""
    q = quotient(x, rms, inverse) if NEAR else tl.div_rn(x, rms + tl.zeros_like(x))
    if CAST.pre_round:
        q = round_to_bf16_away(q)
    return q


@triton.jit
def encode_e8m0_scales(absmax, NEAR: tl.constexpr, FORMAT: tl.constexpr):
    """Codes of the scales 2^k of blocks with these maxima, uint8, 2^k and 2^-k; that is NaN where absmax is not finite.

    Of zeros in rows that are NEAR 2^k is larger than the scale, so that all products with it are in FP32's range.
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
    """Those of NVFP4, and what elements are multiplied with, which is no power of two."""
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
    """Numbers in pairs, float32 [rows, spans, words] over their scales -> uint8 [rows, spans, 2 words].

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
    """The same in E2M1, of magnitudes, with the signs of the bf16 numbers in `word`: uint8 [rows, spans, words].

    The first of two is in the low bits.
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
    """Of magnitudes m, in the last byte of an int32.

    It is m over the step of its binade, 0.5, 1 or 2, plus 0, 2 or 4: the least of the three. Each is a sum with the
    anchor that is rounded once, to a whole number; the anchor's last byte is 0. None is negative, so that their bits
    compare as they do.
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
