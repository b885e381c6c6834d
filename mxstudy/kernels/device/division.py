"""Division by a row's RMS, of which 1 / rms is known.

With y = 1 / rms and q = x y, both rounded, q - (q rms - x) y in fused products is x / rms rounded once (Markstein
1990), which was tried for each of the 2^7 x 2^23 pairs of significands that a bf16 x and an FP32 rms can have. It needs
numbers that are finite and not near an end of FP32's range: below 2^-80 or so the last bit may be another one.
"""

import triton
import triton.language as tl


@triton.jit
def quotient(x, rms, inverse):
    """x / rms in three operations; `inverse`: 1 / rms rounded once. A zero keeps its sign; of infinity it is NaN."""
    q = x * inverse
    return tl.fma(tl.fma(q, rms, x * -1.0), inverse * -1.0, q)  # a minus would lose the sign of a zero
