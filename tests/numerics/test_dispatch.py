"""Copies of tokens go to the rows of their experts and come back, as lists in plain Python say."""

import pytest
import torch

from mxstudy.numerics.dispatch import Dispatch, combine, dispatch_of, number_of_rows, sum_of_copies, to_rows

EXPERTS, ALIGN = 5, 4
# 9 tokens each go to two of five experts. Nobody goes to expert 3, and expert 1 gets more than a multiple of 4.
CHOSEN = torch.tensor([[1, 0], [1, 2], [0, 1], [4, 1], [1, 4], [2, 0], [1, 4], [4, 2], [0, 4]])


def by_hand(chosen: torch.Tensor, align: int) -> list[list[int]]:
    """Return the copies in the rows of each expert, filled up with -1."""
    copies = [
        (expert, 2 * token + j) for token, experts in enumerate(chosen.tolist()) for j, expert in enumerate(experts)
    ]
    rows = [[copy for own, copy in copies if own == expert] for expert in range(EXPERTS)]
    return [own + [-1] * (max(align, -(-len(own) // align) * align) - len(own)) for own in rows]


@pytest.mark.parametrize("align", [1, 4, 8])
def test_rows_are_in_the_order_of_experts_and_tokens(align):
    found, rows = dispatch_of(CHOSEN, EXPERTS, align), by_hand(CHOSEN, align)
    flat = [copy for own in rows for copy in own]
    size = number_of_rows(18, EXPERTS, align)
    assert [c if c < 18 else -1 for c in found.copies_N.tolist()] == flat + [-1] * (size - len(flat))
    assert found.ends_E.tolist() == torch.tensor([len(own) for own in rows]).cumsum(0).tolist()
    assert found.loads_E.tolist() == [4, 6, 3, 0, 5]
    assert [[flat[row] for row in pair] for pair in found.rows_TK.tolist()] == torch.arange(18).view(9, 2).tolist()


def test_the_number_of_rows_is_enough_for_any_choice():
    """In the worst case every expert but one has one token more than a multiple."""
    for align in (1, 4, 32):
        for copies in range(1, 200):
            uneven = min(copies, EXPERTS - 1)
            rows = uneven * align + max(1, -(-(copies - uneven) // align)) * align
            assert rows <= number_of_rows(copies, EXPERTS, align)
            assert number_of_rows(copies, EXPERTS, align) % align == 0


def test_tokens_are_gathered_and_zeros_stand_between():
    x_TD = torch.arange(18.0).view(9, 2) + 1
    x_TD[3, 0] = torch.nan  # in one token, so it must not reach the zeros
    found = to_rows(x_TD, dispatch_of(CHOSEN, EXPERTS, ALIGN))
    expected = [x_TD[copy // 2] if copy >= 0 else torch.zeros(2) for own in by_hand(CHOSEN, ALIGN) for copy in own]
    torch.testing.assert_close(found[: len(expected)], torch.stack(expected), rtol=0, atol=0, equal_nan=True)
    assert not found[len(expected) :].any()


def test_copies_are_summed_in_order_with_their_weights():
    dispatch, generator = dispatch_of(CHOSEN, EXPERTS, ALIGN), torch.Generator().manual_seed(0)
    x_ND = torch.randn(len(dispatch.copies_N), 3, generator=generator)
    weights_TK = torch.rand(9, 2, generator=generator)
    first, second = (x_ND[dispatch.rows_TK[:, j]] for j in (0, 1))
    assert torch.equal(sum_of_copies(x_ND, dispatch), first + second)
    expected = first * weights_TK[:, :1] + second * weights_TK[:, 1:]
    assert torch.equal(combine(x_ND, weights_TK, dispatch), expected)


def test_the_gradients_of_a_combination_are_those_of_indexing():
    dispatch, generator = dispatch_of(CHOSEN, EXPERTS, ALIGN), torch.Generator().manual_seed(0)
    x_ND = torch.randn(len(dispatch.copies_N), 3, generator=generator, requires_grad=True)
    weights_TK = torch.rand(9, 2, generator=generator, requires_grad=True)
    dy_TD = torch.randn(9, 3, generator=generator)
    combine(x_ND, weights_TK, dispatch).backward(dy_TD)
    found, (x_ND.grad, weights_TK.grad) = (x_ND.grad, weights_TK.grad), (None, None)
    (x_ND[dispatch.rows_TK] * weights_TK[..., None]).sum(1).backward(dy_TD)
    assert torch.equal(found[0], x_ND.grad)
    torch.testing.assert_close(found[1], weights_TK.grad)


def test_nothing_is_added_by_atomics_or_asks_for_a_size():
    """Nothing that depends on order or size runs: no atomic addition, and no question for a size.

    index_add and its kind add in any order, and a size makes the host wait.
    """
    seen = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x_TD = torch.randn(9, 4, requires_grad=True)
    with Watching():
        dispatch = dispatch_of(CHOSEN, EXPERTS, ALIGN)
        rows = to_rows(x_TD.detach(), dispatch).requires_grad_()
        combine(rows, torch.rand(9, 2, requires_grad=True), Dispatch(*dispatch)).sum().backward()
        sum_of_copies(rows.detach(), dispatch)
    assert not [name for name in seen if any(part in name for part in ("add_", "put", "_local_scalar", "nonzero"))]
