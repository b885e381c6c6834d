"""Block scales: E8M0, a power of two from the bits of the block's absmax; and NVFP4's E4M3 under an FP32 outer scale.

Scales are exact, with the same bits on every device, eager or compiled.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mxstudy.numerics.formats import FORMATS, SCALE_RULES, ElementFormat, look_up
from mxstudy.numerics.grid import EXPONENT_MASK, MAGNITUDE_MASK, MANTISSA_BITS, MANTISSA_MASK, round_to_grid

NAN_BITS = 0x7FC00000
HALF_MIN_NORMAL_BITS = 0x00400000  # 2^-127, an FP32 subnormal: E8M0 code 0
NAN_SCALE = 0xFF
E4M3 = FORMATS["E4M3"]
MIN_NORMAL = 2.0**-126  # FP32's; as the least scale it prevents division by zero
FP32_MAX = torch.finfo(torch.float32).max


def absmax_bits(x: Tensor, axis: int | tuple[int, ...]) -> Tensor:
    """Return the FP32 bits (int32) of the largest magnitude along `axis`, kept as an axis of 1.

    The bits order as magnitudes do, with NaN last; a compiled maximum of floats may lose a NaN.
    """
    return (x.view(torch.int32) & MAGNITUDE_MASK).amax(axis, keepdim=True)


# -------------------------------------------------------------------------------------------------------------- E8M0


def scale_codes(bits: Tensor, fmt: ElementFormat, scale_rule: str, bump: Tensor | int = 0) -> Tensor:
    """Return E8M0 codes (int32) from the FP32 bits of block absmax.

    A code is k + bump + 127, clamped to [0, 254]; it is 0xFF where absmax is not finite.
    """
    exponent = ((bits + look_up(SCALE_RULES, scale_rule, "scale_rule")(fmt)) >> MANTISSA_BITS) - 127 - fmt.emax + bump
    return torch.where(bits >= EXPONENT_MASK, NAN_SCALE, exponent.clamp(-127, 127) + 127)


def code_bump(blocks: Tensor, axis: int) -> Tensor:
    """Return what the instability paper's public code adds to floor's k against overflow: 0 or 1 (int32).

    `blocks` [.., n, B, ..], `axis` that of n. The intent is 1 for a block whose absmax is over 1.75 times a power of
    two (E4M3's max is 1.75 * 2^8), which is rceil. But the code takes the maxima along the wrong one of the two axes:
    over all blocks' first elements, over all second elements, and so on. So the result is 1 for a position within the
    block, [.., 1, B, ..]: elements of one block get scales of their own, and most that overflow are clamped as before.
    """
    bits = absmax_bits(blocks, axis)
    return ((bits < EXPONENT_MASK) & (bits & MANTISSA_MASK > E4M3.max_mantissa)).to(torch.int32)


def decode_scales(codes: Tensor) -> Tensor:
    """Return 2^(code - 127) in float32, exactly, or NaN for 0xFF."""
    codes = codes.to(torch.int32)
    bits = torch.where(codes == 0, HALF_MIN_NORMAL_BITS, codes << MANTISSA_BITS)
    return torch.where(codes == NAN_SCALE, NAN_BITS, bits).view(torch.float32)


def divide_by_scales(x: Tensor, codes: Tensor) -> Tensor:
    """Return x / 2^(code - 127) as an exact product, or NaN where the code is 0xFF."""
    inverse = torch.where(codes == NAN_SCALE, NAN_SCALE, 254 - codes)
    return x * decode_scales(inverse)


# ------------------------------------------------------------------------------------- FP32 scales, and NVFP4's E4M3


def divide(x: Tensor, constant: float) -> Tensor:
    """Return x (fp32) / constant as a float64 product with the reciprocal, which is how GPUs compute such a quotient.

    For 6, 448, 2688 and 57344 this is the quotient, rounded once: no quotient lies closer than 2^-30, relative, to the
    middle between two float32 numbers. With these constants times 16/17 (a headroom), 2 % of the quotients would lie in
    the middle, where a true division depends on the device.
    """
    return (x.to(torch.float64) * (1 / constant)).to(torch.float32)


def fill_scale(absmax: Tensor, largest: float, smallest: float = MIN_NORMAL) -> Tensor:
    """Return the FP32 scale that maps absmax to `largest`, at least `smallest`, or NaN where absmax is not finite."""
    scale = divide(absmax, largest).clamp_min(smallest)
    return torch.where(absmax < torch.inf, scale, torch.nan)


def e4m3_outer_scale(absmax: Tensor, largest: float, largest_scale: float = E4M3.max) -> Tensor:
    """Return the FP32 scale under which the largest block's scale is `largest_scale`, for elements up to `largest`.

    It is at least 2^-120, so that the reciprocal of its product with any block's scale is finite.
    """
    return fill_scale(absmax, largest * largest_scale, MIN_NORMAL / 2.0**E4M3.emin)


def e4m3_block_scales(absmax: Tensor, outer: Tensor, largest: float) -> Tensor:
    """Return block absmax / largest / outer scale on the E4M3 grid: fp32, without subnormals.

    It is NaN where absmax is not finite.
    """
    scale = (divide(absmax, largest) / outer).clamp_min(2.0**E4M3.emin)
    return torch.where(absmax < torch.inf, round_to_grid(scale, E4M3, "even"), torch.nan)


def e4m3_training_scales(absmax: Tensor, outer: Tensor, largest: float, largest_scale: float) -> tuple[Tensor, Tensor]:
    """Return block scales on the E4M3 grid, and the factors on their elements: fp32, in Transformer Engine's order.

        S = min(largest * largest_scale / outer, FP32's max); 1 where that or `outer` is 0
        scale = E4M3(absmax * (S * (1 / largest))), saturated; factor = min(1 / (scale * (1 / S)), FP32's max)

    `outer`: the absmax of all blocks together, of absmax's shape. A scale may be subnormal or 0; the elements of a 0
    are saturated, and decode to 0. Both results are NaN where an absmax is not finite.
    """
    encode = (torch.full_like(outer, largest * largest_scale) / outer).clamp_max(FP32_MAX)
    encode = torch.where((outer == 0) | (encode == 0), 1.0, encode)
    scale = round_to_grid(absmax * (encode * float(np.float32(1 / largest))), E4M3, "even")
    factor = torch.ones_like(scale) / (scale * (torch.ones_like(encode) / encode))
    is_finite = (absmax < torch.inf) & (outer < torch.inf)
    return torch.where(is_finite, scale, torch.nan), torch.where(is_finite, factor.clamp_max(FP32_MAX), torch.nan)


# ------------------------------------------------------------------------------------------- sums in a fixed order


def pairwise_sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the sum over each axis by halves, first half plus second: the same bits on every device; axes kept as 1.

    With an odd length, the last number waits for the next round.
    """
    for axis in axes:
        while (size := x.shape[axis]) > 1:
            half = size // 2
            first, second, rest = x.split([half, half, size % 2], axis)
            x = torch.cat([first + second, rest], axis) if size % 2 else first + second
    return x
