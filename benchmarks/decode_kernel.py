"""Provide the Triton kernel of `benchmarks.decode`. Only GPU builds of torch include Triton."""

import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    codes_ptr,
    scales_ptr,
    decoded_ptr,
    size,
    BLOCK: tl.constexpr,
    IS_E4M3: tl.constexpr,
    E4M3_SCALES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Decode finite E4M3 codes, or pairs of E2M1, with E8M0 or E4M3 block scales to bf16."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    scale = tl.load(scales_ptr + at // BLOCK, mask=at < size, other=0)
    if E4M3_SCALES:
        factor = scale.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        factor = tl.maximum(scale.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
    if IS_E4M3:
        value = tl.load(codes_ptr + at, mask=at < size, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        byte = tl.load(codes_ptr + at // 2, mask=at < size, other=0).to(tl.int32)
        code = tl.where(at % 2 == 0, byte, byte >> 4) & 0xF
        half = code & 7  # in halves: magnitudes are 0, 1, 2, 3, then go in steps of 2 and of 4
        magnitude = tl.where(half < 4, half, tl.where(half < 6, 2 * half - 4, 4 * half - 16)).to(tl.float32) * 0.5
        value = tl.where(code >= 8, -magnitude, magnitude)
    tl.store(decoded_ptr + at, (value * factor).to(tl.bfloat16), mask=at < size)
