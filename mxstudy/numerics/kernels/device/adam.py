"""Adam of a stack's parameter in float32, operation by operation as `mxstudy.train.stack_optimizer` has it."""

import triton
import triton.language as tl


@triton.jit
def adam_kernel(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    lr_ptr,
    unbias_m_ptr,
    unbias_v_ptr,
    alive_ptr,
    size,
    unbias_stride,
    ONE_LESS_BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    ONE_LESS_BETA2: tl.constexpr,
    EPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """p, m, v and g [replicas, size]; lr and alive [replicas]; both corrections [replicas], or one for all."""
    replica = tl.program_id(1).to(tl.int64)
    if tl.load(alive_ptr + replica) == 0:
        return
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = index < size
    offsets = replica * size + index
    g = tl.load(g_ptr + offsets, mask=mask)
    m = tl.load(m_ptr + offsets, mask=mask)
    v = tl.load(v_ptr + offsets, mask=mask)
    p = tl.load(p_ptr + offsets, mask=mask)
    m = m + (g - m) * ONE_LESS_BETA1
    v = v * BETA2 + g * g * ONE_LESS_BETA2
    scaled = m * tl.load(unbias_m_ptr + replica * unbias_stride)
    root = tl.sqrt_rn(v) * tl.load(unbias_v_ptr + replica * unbias_stride)
    change = tl.div_rn(scaled, root + EPS)
    tl.store(m_ptr + offsets, m, mask=mask)
    tl.store(v_ptr + offsets, v, mask=mask)
    tl.store(p_ptr + offsets, p - tl.load(lr_ptr + replica) * change, mask=mask)
