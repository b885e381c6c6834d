"""Means of a stack's replicas: beside float64, and the same bits in every stack."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE

from mxstudy.numerics.kernels.sums import mean_in_order, run

pytestmark = pytest.mark.integration
SHAPES = [(1, 64, 96), (3, 96, 80), (5, 7, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_sums(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = run(x.to(DEVICE)).cpu()
    torch.testing.assert_close(whole.double(), x.double().flatten(1).sum(-1), rtol=1e-5, atol=1e-4)
    for replica in range(shape[0]):
        assert torch.equal(run(x[replica : replica + 1].to(DEVICE)).cpu()[0], whole[replica])


def test_many_chunks():
    x = torch.ones(2, 1025, 4096, dtype=torch.float32)
    x[1] = 2.0**-20
    assert run(x.to(DEVICE)).tolist() == [1025 * 4096, 1025 * 2.0**-8]


def test_gradients():
    x = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(mean_in_order, x)
    assert torch.autograd.gradgradcheck(lambda x: mean_in_order(x.square()), x)
