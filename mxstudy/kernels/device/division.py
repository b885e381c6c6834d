"""Division by a row's RMS when 1 / rms is known.

With y = 1 / rms and q = x y, both rounded, q - (q rms - x) y in fused products is x / rms rounded once (Markstein
1990). This was checked for each of the 2^7 x 2^23 pairs of significands that a bf16 x and an FP32 rms can have. Numbers
must be finite and not near an end of FP32's range: below about 2^-80 the last bit may differ.
"""

import triton
import triton.language as tl


@triton.jit
def quotient(x, rms, inverse):
    """Return x / rms in three operations. `inverse`: 1 / rms rounded once. A zero keeps its sign, infinity is NaN."""
    q = x * inverse
    return tl.fma(tl.fma(q, rms, x * -1.0), inverse * -1.0, q)  # a minus sign would lose the sign of a zero
