"""Send each token's copies to the rows of its experts, and back, without atomic additions or waiting for the GPU.

T tokens have K copies each, one for each expert that the token goes to. There are N dispatched rows; N depends only on
T, K, the number of experts E and the alignment. An expert's rows follow each other, in the order of tokens. Zeros pad
them to a multiple of the alignment, so no block of the token axis lies in two experts. An expert without a token has
one such block of zeros, and the remaining rows are zero, too. Zeros change no scale and no product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy.numerics.grid import to_dtype


class Dispatch(NamedTuple):
    """The rows to which copies go. A copy's number is token * K + j, for the j-th expert of its token.

    `rows_TK`: int64, the row of each copy. `copies_N`: int64, the copy in each row; T * K: a row of zeros. `ends_E`:
    int64, the row after the last one of each expert. `loads_E`: int64, the tokens of each expert.
    """

    rows_TK: Tensor
    copies_N: Tensor
    ends_E: Tensor
    loads_E: Tensor

    @property
    def tokens_N(self) -> Tensor:
        """Return the token in each row, int64; T for a row of zeros."""
        return self.copies_N // self.rows_TK.shape[1]


def number_of_rows(copies: int, num_experts: int, align: int) -> int:
    """Return the number of dispatched rows: enough for any choice of experts, and a multiple of `align`."""
    return (copies // align + num_experts) * align


def dispatch_of(experts_TK: Tensor, num_experts: int, align: int) -> Dispatch:
    """Return where the copies of each token go; `experts_TK`: int64, the experts of each token, all different."""
    copies = experts_TK.numel()
    experts, number = experts_TK.flatten(), torch.arange(copies, device=experts_TK.device)
    by_expert = torch.argsort(experts, stable=True)
    loads_E = (experts[:, None] == torch.arange(num_experts, device=experts.device)).sum(0)
    ends_E = (-(-loads_E // align)).clamp_min(1).mul(align).cumsum(0)
    starts_E = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
    shift_E = starts_E - (loads_E.cumsum(0) - loads_E)  # added to the place in the order by expert, this is the row
    rows = number + shift_E[experts[by_expert]]
    nothing = experts.new_full((number_of_rows(copies, num_experts, align),), copies)
    copies_N = nothing.scatter(0, rows, by_expert)
    rows_TK = torch.empty_like(experts).scatter(0, by_expert, rows).view_as(experts_TK)
    return Dispatch(rows_TK, copies_N, ends_E, loads_E)


def to_rows(x_TD: Tensor, dispatch: Dispatch) -> Tensor:
    """Return each row's token [N, D], in x's dtype; zeros in a row without a token."""
    tokens_N1 = dispatch.tokens_N[:, None]
    rows_ND = x_TD[dispatch.tokens_N.clamp_max(len(x_TD) - 1)]
    return torch.where(tokens_N1 < len(x_TD), rows_ND, torch.zeros((), dtype=x_TD.dtype, device=x_TD.device))


def sum_of_copies(x_ND: Tensor, dispatch: Dispatch, weights_TK: Tensor | None = None) -> Tensor:
    """Return the sum of each token's copies, times their weights if given: float32 [T, D], in order of j."""
    total_TD: Tensor | None = None
    for j in range(dispatch.rows_TK.shape[1]):
        copy_TD = to_dtype(x_ND[dispatch.rows_TK[:, j]], torch.float32)
        copy_TD = copy_TD if weights_TK is None else copy_TD * weights_TK[:, j : j + 1]
        total_TD = copy_TD if total_TD is None else total_TD + copy_TD
    assert total_TD is not None
    return total_TD


def combine(x_ND: Tensor, weights_TK: Tensor, dispatch: Dispatch) -> Tensor:
    """Return the sum of each token's copies times their weights (float32): float32 [T, D]."""
    total_TD: Tensor = _Combine.apply(x_ND, weights_TK, *dispatch)
    return total_TD


class _Combine(torch.autograd.Function):
    """Apply `combine`. A row's gradient is that of its token, times the copy's weight; it is 0 for a padding row."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weights_TK: Tensor, *dispatch: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weights_TK, *dispatch)
        return sum_of_copies(x_ND, Dispatch(*dispatch), weights_TK)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weights_TK, *parts = ctx.saved_tensors
        dispatch = Dispatch(*parts)
        copies_N, last = dispatch.copies_N, weights_TK.numel() - 1
        weights_N1 = weights_TK.flatten()[copies_N.clamp_max(last)][:, None]
        dx_ND = torch.where(copies_N[:, None] <= last, to_rows(dy_TD, dispatch) * weights_N1, 0.0)
        columns = dispatch.rows_TK.unbind(1)
        dweights_TK = torch.stack([(dy_TD * to_dtype(x_ND[rows], torch.float32)).sum(-1) for rows in columns], 1)
        return to_dtype(dx_ND, x_ND.dtype), dweights_TK, None, None, None, None
