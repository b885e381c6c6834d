"""Sums in an order that is a function of how much there is to sum."""

import triton
import triton.language as tl


@triton.jit
def chunk_sums_kernel(x_ptr, sums_ptr, size, CHUNK: tl.constexpr):
    """x [n, size] -> sums [n, programs], each of CHUNK neighbours."""
    chunk = tl.program_id(0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    n = tl.program_id(1).to(tl.int64)
    x = tl.load(x_ptr + n * size + index, mask=index < size, other=0.0)
    tl.store(sums_ptr + n * tl.num_programs(0) + chunk, tl.sum(x, axis=0))


@triton.jit
def total_kernel(sums_ptr, total_ptr, chunks, CHUNKS: tl.constexpr):
    """sums [n, chunks] -> total [n]; CHUNKS: the power of two that chunks fit in."""
    chunk = tl.arange(0, CHUNKS)
    n = tl.program_id(0)
    sums = tl.load(sums_ptr + n.to(tl.int64) * chunks + chunk, mask=chunk < chunks, other=0.0)
    tl.store(total_ptr + n, tl.sum(sums, axis=0))
