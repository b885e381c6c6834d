"""Activations between two linears in float32, forward and backward, and the kernels that cast their results.

A gated activation phi(gate) * up has gate and up side by side in a row of h. A row of PHIS is a phi, and the function
that maps dphi and h to dh. ACTIVATION is a `Rounded` of mxstudy.kernels.activation.
"""

import math

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import operand, store_both, through_bf16, tile_offsets
from mxstudy.kernels.device.exponential import exponential

SQRT_HALF = tl.constexpr(math.sqrt(0.5))
SQRT_TWO_OVER_PI = tl.constexpr(math.sqrt(2 / math.pi))
SQRT_HALF_OVER_PI = tl.constexpr(math.sqrt(0.5 / math.pi))
HUGE = tl.constexpr(2.0**126)
RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
CUBIC = tl.constexpr(0.044715)  # of tanh's argument: Hendrycks and Gimpel 2016


@triton.jit
def activation_cast_both_kernel(
    h_ptr,
    row_ptr,
    column_ptr,
    PHI: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Cast z for both contractions: h [rows, COLUMNS], if gated [rows, 2 COLUMNS] -> two operands [rows, COLUMNS]."""
    STRIDE: tl.constexpr = 2 * COLUMNS if ACTIVATION.gated else COLUMNS
    read = tile_offsets(COLUMNS, STRIDE, TILE)
    z = PHI(tl.load(h_ptr + read).to(tl.float32))
    if ACTIVATION.gated:
        z = through_bf16(z, ACTIVATION.round_gate) * tl.load(h_ptr + read + COLUMNS).to(tl.float32)
    store_both(z, row_ptr, column_ptr, tile_offsets(COLUMNS, COLUMNS, TILE), None, ACTIVATION.round_output, CAST)


@triton.jit
def activation_backward_cast_both_kernel(
    dz_ptr,
    h_ptr,
    row_ptr,
    column_ptr,
    again_ptr,
    PHI: tl.constexpr,
    PHI_BACKWARD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
    CAST_OF_Z: tl.constexpr,
):
    """Cast dh in bf16 for both contractions: dz [rows, COLUMNS] and the forward's h -> two operands of h's shape.

    `again_ptr`: where z's column operand goes, or None.
    """
    GATED: tl.constexpr = ACTIVATION.gated
    STRIDE: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    offsets = tile_offsets(COLUMNS, STRIDE, TILE)
    inner = tile_offsets(COLUMNS, COLUMNS, TILE)
    dphi = tl.load(dz_ptr + inner).to(tl.float32)
    h = tl.load(h_ptr + offsets).to(tl.float32)
    if GATED or again_ptr is not None:
        z = PHI(h)
    if GATED:
        there = offsets + COLUMNS
        up = tl.load(h_ptr + there).to(tl.float32)
        z = through_bf16(z, ACTIVATION.round_gate)
        store_both(dphi * z, row_ptr, column_ptr, there, None, True, CAST)
        z = z * up
        dphi = through_bf16(dphi * up, ACTIVATION.round_gate)
    if again_ptr is not None:
        tl.store(again_ptr + inner, operand(z, 0, ACTIVATION.round_output, CAST_OF_Z))
    store_both(PHI_BACKWARD(dphi, h), row_ptr, column_ptr, offsets, None, True, CAST)


@triton.jit
def sigmoid(x):
    return 1 / (1 + exponential(-x))


@triton.jit
def relu(x):
    return tl.where(x <= 0, 0.0, x)  # keeps NaN


@triton.jit
def relu_backward(dy, x):
    return tl.where(x <= 0, 0.0, dy)


@triton.jit
def relu2(x):
    return relu(x) * relu(x)


@triton.jit
def relu2_backward(dy, x):
    return relu_backward(dy * (2 * relu(x)), x)


@triton.jit
def one_over(x):
    """Return r and s of x >= 1 such that r * (a * s) is a / x for any a, with the bits of Triton's own division.

    A division is expanded to this, and to a case for small x, anew for each a.
    """
    s = tl.where(x > HUGE, 0.25, 1.0)
    return tl.inline_asm_elementwise(RECIPROCAL, "=f,f", [x * s], dtype=tl.float32, is_pure=True, pack=1), s


@triton.jit
def silu(x):
    r, s = one_over(1 + exponential(-x))
    return r * (x * s)


@triton.jit
def silu_backward(dy, x):
    r, s = one_over(1 + exponential(-x))
    gate = r * s
    return dy * gate * (1 + x * (1 - gate))


@triton.jit
def gelu(x):
    return x * 0.5 * (1 + tl.erf(x * SQRT_HALF))


@triton.jit
def gelu_backward(dy, x):
    cdf = 0.5 * (1 + tl.erf(x * SQRT_HALF))
    return dy * (cdf + x * (SQRT_HALF_OVER_PI * tl.exp(-0.5 * x * x)))


@triton.jit
def gelu_tanh_gate(x):
    """Return (1 + tanh(u)) / 2, computed as the equal sigmoid(2 u), which has no cancellation."""
    return sigmoid(2 * SQRT_TWO_OVER_PI * (x + CUBIC * x * x * x))


@triton.jit
def gelu_tanh(x):
    return x * gelu_tanh_gate(x)


@triton.jit
def gelu_tanh_backward(dy, x):
    gate = gelu_tanh_gate(x)
    slope = 2 * SQRT_TWO_OVER_PI * (1 + 3 * CUBIC * x * x)
    return dy * (gate + x * (gate * (1 - gate) * slope))


PHIS = {
    "relu": (relu, relu_backward),
    "relu2": (relu2, relu2_backward),
    "silu": (silu, silu_backward),
    "gelu": (gelu, gelu_backward),
    "gelu_tanh": (gelu_tanh, gelu_tanh_backward),
}
