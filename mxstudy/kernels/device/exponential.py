"""The exponential with the bits of Triton's own, but 0 where that is subnormal, in two instructions instead of five."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
POWER_OF_TWO = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")


@triton.jit
def exponential(x):
    """Return e^x of a tile, float32."""
    return tl.inline_asm_elementwise(POWER_OF_TWO, "=f,f", [x * LOG2_E], dtype=tl.float32, is_pure=True, pack=1)
