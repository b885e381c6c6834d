"""Load and store one tile per element that a thread holds: tensors [groups below, groups beside one another].

For groups along a row a thread moves vectors of 128 bits and takes them apart; for groups along a column it moves what
is adjacent in each row. CAST is a `CompiledCast` of mxstudy.kernels.operand_cast.
"""

import triton
import triton.language as tl

VECTOR_BITS = tl.constexpr(128)


@triton.jit
def load(ptr, first, mask, STEP: tl.constexpr, CAST: tl.constexpr):
    """Return float32 tensors, one for each element of a part: those at `first`, at `first` + STEP, and so on."""
    PART: tl.constexpr = CAST.part_size
    elements = ()
    if STEP == 0:
        same = tl.load(ptr + first, mask=mask).to(tl.float32)
        for _ in tl.static_range(PART):
            elements += (same,)
    elif STEP == 1 and CAST.axis == 1:
        VECTOR: tl.constexpr = VECTOR_BITS // ptr.dtype.element_ty.primitive_bitwidth
        offsets = first[:, :, None] + tl.arange(0, VECTOR)[None, None, :]
        for vector in tl.static_range(PART // VECTOR):
            of_vector = None if mask is None else mask[:, :, None]
            x = tl.load(ptr + offsets + vector * VECTOR, mask=of_vector).to(tl.float32)
            elements += apart(x, VECTOR)
    else:
        for i in tl.static_range(PART):
            elements += (tl.load(ptr + first + i * STEP, mask=mask).to(tl.float32),)
    return elements


@triton.jit
def apart(x, WIDTH: tl.constexpr):
    """Split the last axis into WIDTH tensors, in order: x [a, b, WIDTH] into tensors [a, b]."""
    found = (x,)
    HALVINGS: tl.constexpr = 3 if WIDTH == 8 else 2
    for i in tl.static_range(HALVINGS):
        even = ()
        odd = ()
        for j in tl.static_range(1 << i):
            y = found[j]
            if i == HALVINGS - 1:
                pairs = tl.reshape(y, (y.shape[0], y.shape[1], 2))
            else:
                pairs = tl.reshape(y, (y.shape[0], y.shape[1], y.shape[2] // 2, 2))
            low, high = tl.split(pairs)
            even += (low,)
            odd += (high,)
        found = even + odd
    return found


@triton.jit
def together(elements, START: tl.constexpr, WIDTH: tl.constexpr):
    """Undo `apart`, for WIDTH elements from START on."""
    found = ()
    for i in tl.static_range(WIDTH):
        found += (elements[START + i],)
    HALVINGS: tl.constexpr = 3 if WIDTH == 8 else 2
    for i in tl.static_range(HALVINGS):
        doubled = ()
        for j in tl.static_range(WIDTH >> (i + 1)):
            pairs = tl.join(found[j], found[j + (WIDTH >> (i + 1))])
            doubled += (tl.reshape(pairs, (pairs.shape[0], pairs.shape[1], 2 << i)),)
        found = doubled
    return found[0]


@triton.jit
def store(ptr, first, mask, elements, CAST: tl.constexpr):
    """Store the tile in bf16."""
    PART: tl.constexpr = CAST.part_size
    if CAST.axis == 1:
        VECTOR: tl.constexpr = VECTOR_BITS // 16
        offsets = first[:, :, None] + tl.arange(0, VECTOR)[None, None, :]
        rounded = ()
        for i in tl.static_range(PART):
            rounded += (elements[i].to(tl.bfloat16),)
        for vector in tl.static_range(PART // VECTOR):
            x = together(rounded, vector * VECTOR, VECTOR)
            tl.store(ptr + offsets + vector * VECTOR, x, mask=mask[:, :, None])
    else:
        for i in tl.static_range(PART):
            tl.store(ptr + first + i * CAST.columns, elements[i].to(tl.bfloat16), mask=mask)
