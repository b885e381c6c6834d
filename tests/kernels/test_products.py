"""Both gradients of a linear, from operands that are already cast, agree with float64, in parallel or not."""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from fused import DEVICE
from torch import library

from mxstudy.kernels import linear_gradients
from mxstudy.kernels import products as gemms


def operands(*stack: int) -> list[torch.Tensor]:
    """Return small integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 96), (64, 32), (64, 96), (96, 32))
    return [torch.randint(-3, 4, (*stack, *s), generator=generator).to(DEVICE, torch.bfloat16) for s in shapes]


@pytest.mark.parametrize("stack", [(), (1,), (3,)])
@pytest.mark.parametrize("fills", [True, False])
def test_both_gradients(stack, fills, monkeypatch):
    """Both run in parallel if neither product fills a GPU, and one after the other if both do."""
    monkeypatch.setattr(gemms, "TILE", 1 if fills else gemms.TILE)
    dy, x, dy_dgrad, w = operands(*stack)
    dw, dx = linear_gradients(dy, x, dy_dgrad, w)
    assert_same_bits(dw, (dy.double().mT @ x.double()).to(torch.bfloat16))
    assert_same_bits(dx, (dy_dgrad.double() @ w.double()).to(torch.bfloat16))


@pytest.mark.integration
def test_is_an_operator():
    library.opcheck(torch.ops.mxstudy.linear_gradients, tuple(operands(2)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_side_by_side_in_a_graph():
    """A graph replays them with operands that change."""
    inputs = operands(1)
    linear_gradients(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear_gradients(*inputs)
    for x in inputs:
        x.mul_(2)
    graph.replay()
    for one, other in zip(captured, linear_gradients(*inputs), strict=True):
        assert_same_bits(one, other)
