"""Provide the Triton kernel of `benchmarks.floor`. Only GPU builds of torch include Triton."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, codes_ptr, scales_ptr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Copy the upper bytes of each int32 of x, a pair of bf16, until codes is full, and write a byte per block."""
    program = tl.program_id(0).to(tl.int64)
    pairs = program * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + pairs, cache_modifier=".cg")
    tl.store(codes_ptr + pairs, (x >> 16).to(codes_ptr.dtype.element_ty), cache_modifier=".cs")
    blocks = tl.arange(0, BLOCKS)
    tl.store(scales_ptr + program * BLOCKS + blocks, blocks.to(tl.int8), cache_modifier=".cs")
