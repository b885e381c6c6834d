"""The kernel of `benchmarks.floor`. Only GPU builds of torch bring Triton."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, codes_ptr, scales_ptr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """x int32, a pair of bf16 each -> the upper bytes of each, as many as codes has; a byte a block."""
    program = tl.program_id(0).to(tl.int64)
    pairs = program * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + pairs, cache_modifier=".cg")
    tl.store(codes_ptr + pairs, (x >> 16).to(codes_ptr.dtype.element_ty), cache_modifier=".cs")
    blocks = tl.arange(0, BLOCKS)
    tl.store(scales_ptr + program * BLOCKS + blocks, blocks.to(tl.int8), cache_modifier=".cs")
