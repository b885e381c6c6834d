"""Cross-entropy of rows of logits: a row is read once for its sum and once more, backwards, for its gradient.

A program has a row, WIDTH columns at a time, and asks for the next ones before it computes with these. Its threads keep
a maximum and a sum for every GROUP neighbouring columns, so that they meet only at the end of the row. The rows of all
programs at once may not fit into the L2 cache, but their last columns do, so the second reading begins with these.
"""

import triton
import triton.language as tl

from mxstudy.kernels.device.exponential import exponential

GROUP = tl.constexpr(8)  # 16 bytes in bf16
LEAST = tl.constexpr(-3.0e38)  # below every logit, and finite: exp(-inf - LEAST) is 0, not NaN


@triton.jit
def cross_entropy_kernel(
    logits_ptr,
    targets_ptr,
    nats_ptr,
    scale,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
):
    """Write the loss of a row of logits [rows, COLUMNS], bf16 or float32; with a gradient, write it over the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * COLUMNS
    target = tl.load(targets_ptr + row)
    is_column = (target >= 0) & (target < COLUMNS)
    of_target = tl.load(logits_ptr + target, mask=is_column, other=float("nan")).to(tl.float32)
    groups = tl.arange(0, WIDTH // GROUP) * GROUP
    columns = groups[:, None] + tl.arange(0, GROUP)[None, :]

    LAST: tl.constexpr = (COLUMNS - 1) // WIDTH * WIDTH
    top = tl.full((WIDTH // GROUP,), LEAST, tl.float32)
    total = tl.zeros((WIDTH // GROUP,), tl.float32)
    x = tl.load(logits_ptr + columns, mask=columns < COLUMNS, other=-float("inf"))
    for start in range(0, LAST, WIDTH):
        following = start + WIDTH + columns
        ahead = tl.load(logits_ptr + following, mask=following < COLUMNS, other=-float("inf"))
        top, total = added(x, top, total)
        x = ahead
    top, total = added(x, top, total)
    highest = tl.max(top, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(nats_ptr + row, log_sum - of_target)

    if WITH_GRADIENT:
        scale = tl.where(is_column, scale, float("nan"))
        for after in range(0, COLUMNS, WIDTH):
            there = LAST - after + columns
            ahead = tl.load(logits_ptr + there - WIDTH, mask=there >= WIDTH, other=0.0)
            gradient = exponential(x.to(tl.float32) - log_sum) * scale
            tl.store(logits_ptr + there, gradient.to(logits_ptr.dtype.element_ty), mask=there < COLUMNS)
            x = ahead
        tl.debug_barrier()  # the target's comes after what another thread has stored there
        of_target = tl.exp(of_target - log_sum) * scale - scale
        tl.store(logits_ptr + target, of_target.to(logits_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def added(x, top, total):
    """Return the maxima and sums of groups, with the groups' next columns x [groups, GROUP] added."""
    x = x.to(tl.float32)
    higher = tl.maximum(top, tl.max(x, 1))
    return higher, total * exponential(top - higher) + tl.sum(exponential(x - higher[:, None]), 1)
