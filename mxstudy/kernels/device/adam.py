"""Adam of one parameter of a stack in float32, operation by operation as in `mxstudy.students.optimizer`.

The operands that the weight's two GEMMs read in the next step are cast while the new weight is in registers.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.cast_both import store_both, tile_offsets


@triton.jit
def adam_kernel(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    row_ptr,
    column_ptr,
    lr_ptr,
    unbias_m_ptr,
    unbias_v_ptr,
    alive_ptr,
    unbias_stride,
    ONE_LESS_BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    ONE_LESS_BETA2: tl.constexpr,
    EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    CAST: tl.constexpr,
):
    """Update p, m and v [replicas, rows, COLUMNS], with TILES tiles per replica; g has their shape, float32 or bf16.

    lr and alive: [replicas]; both bias corrections: [replicas], or one for all. Both operands: p's shape, or None.
    """
    replica = tl.program_id(0) // TILES
    if tl.load(alive_ptr + replica) == 0:
        return
    offsets = tile_offsets(COLUMNS, COLUMNS, TILE)
    g = tl.load(g_ptr + offsets).to(tl.float32)
    m = tl.load(m_ptr + offsets)
    v = tl.load(v_ptr + offsets)
    p = tl.load(p_ptr + offsets)
    m = m + (g - m) * ONE_LESS_BETA1
    v = v * BETA2 + g * g * ONE_LESS_BETA2
    scaled = m * tl.load(unbias_m_ptr + replica * unbias_stride)
    root = tl.sqrt_rn(v) * tl.load(unbias_v_ptr + replica * unbias_stride)
    p = p - tl.load(lr_ptr + replica) * tl.div_rn(scaled, root + EPS)
    tl.store(m_ptr + offsets, m)
    tl.store(v_ptr + offsets, v)
    tl.store(p_ptr + offsets, p)
    if row_ptr is not None:
        store_both(p, row_ptr, column_ptr, offsets, None, False, CAST)
