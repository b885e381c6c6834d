"""Grouped GEMMs: groups of one matrix's rows times a matrix of each, plain or under FP32 scales, as operators of torch.

Both are references: `mxstudy.compat.torch_grouped_mm` has the GPU's plain one, `mxstudy.kernels.scaled_grouped_mm` the
one under scales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from mxstudy.compat import torch_grouped_mm
from mxstudy.numerics.gemms import Operand, gemm

GROUPED_BLOCKS = (16, 32, 64, 128)  # sizes of the blocks whose FP32 scales a grouped GEMM takes


def groups_of(ends_E: Tensor) -> list[slice]:
    """Return the slice of each group, from where each ends; the host waits for the device."""
    ends = ends_E.tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _loop_of_products(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Compute torch._grouped_mm: groups of a's rows times b's matrices, or groups of both contraction axes."""
    groups = groups_of(ends_E)
    if b.ndim == 3:
        return torch.cat([a[group] @ b[i] for i, group in enumerate(groups)])
    return torch.stack([a[:, group] @ b[group] for group in groups])


# On CPU it is an opaque operator: compiled, torch._grouped_mm takes no FP32, which operands have there.
_opaque_grouped_mm = library.custom_op("mxstudy::grouped_mm", _loop_of_products, mutates_args=())


@_opaque_grouped_mm.register_fake
def empty_product(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Return an empty tensor of the product's shape."""
    return a.new_empty((a.shape[0], b.shape[-1]) if b.ndim == 3 else (len(ends_E), a.shape[0], b.shape[-1]))


def grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Return a [N, K] times b [E, K, M] by groups of rows, or the groups of a [M, N] times b [N, K]: [E, M, K].

    `ends_E`: int32, where each group of the N ends; the last one is N. bf16 on a GPU, FP32 on a CPU.
    """
    product = _opaque_grouped_mm if a.device.type == "cpu" else torch_grouped_mm.grouped_mm
    return product(a, b, ends_E)


@library.custom_op("mxstudy::scaled_grouped_mm", mutates_args=())
def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor | None,
    b_scales: Tensor | None,
    ends_E: Tensor,
    a_blocks: Tensor | None = None,
    b_blocks: Tensor | None = None,
    block_size: int = 0,
) -> Tensor:
    """Return `grouped_mm`, each sum in FP32 multiplied by its scales before it is rounded, once, to a's dtype.

    `a_scales` are for the rows of the results, `b_scales` for their columns: float32 [E or 1, rows or 1] and [E or 1,
    columns or 1]; an axis of 1 has one scale for all, and None is 1. With a `block_size` a sum is that of its blocks of
    the contraction axis, each multiplied by its scales before they are added: `a_blocks` and `b_blocks`, float32 of the
    shapes of a and b but for that axis, or None. No block lies in two groups. The kernel:
    `mxstudy.kernels.scaled_grouped_mm`.
    """
    groups, columns, every = groups_of(ends_E), b.shape[-1], slice(None)
    row_scales, column_scales = (
        None if s is None else s.expand(len(groups), size) for s, size in ((a_scales, len(a)), (b_scales, columns))
    )

    def at(scales: Tensor | None, *where: Any) -> Tensor | None:
        return None if scales is None else scales[where]

    def of_rows(i: int, group: slice) -> Tensor:
        left = Operand(a[group], at(row_scales, i, group, None), at(a_blocks, group), block_size)
        return gemm(left, Operand(b[i], at(column_scales, i), at(b_blocks, i), block_size), a.dtype)

    def of_contraction(i: int, group: slice) -> Tensor:
        if group.start == group.stop:
            return a.new_zeros(len(a), columns)
        size = block_size or 1  # without blocks nothing reads the slice
        blocks = slice(group.start // size, group.stop // size)
        left = Operand(a[:, group], at(row_scales, i, every, None), at(a_blocks, every, blocks), block_size)
        return gemm(left, Operand(b[group], at(column_scales, i), at(b_blocks, blocks), block_size), a.dtype)

    if b.ndim == 3:
        return torch.cat([of_rows(i, group) for i, group in enumerate(groups)])
    return torch.stack([of_contraction(i, group) for i, group in enumerate(groups)])


@scaled_grouped_mm.register_fake
def _(
    a: Tensor, b: Tensor, a_scales: Tensor | None, b_scales: Tensor | None, ends_E: Tensor, *blocks: object
) -> Tensor:
    return empty_product(a, b, ends_E)
