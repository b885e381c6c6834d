"""Three products of TF32 are as near to float64 as one of FP32."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE

from mxstudy.kernels.matmul_fp32 import launch_cuda, linear_fp32

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    "shapes", [((128, 96), (96, 64)), ((3, 64, 512), (3, 512, 192)), ((32, 32), (32, 16)), ((24, 8), (8, 8))]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_beside_float64(shapes, transposed):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(DEVICE) for shape in shapes)
    if transposed:
        a, b = (t.mT.contiguous().mT for t in (a, b))
    exact = a.double() @ b.double()
    assert (launch_cuda(a, b) - exact).abs().max() <= 2.0**-22 * a.shape[-1] ** 0.5 * exact.abs().max()


@pytest.mark.parametrize("size", [64, pytest.param(512, marks=pytest.mark.gpu)])
def test_no_bit_depends_on_the_stack(size):
    """A replica alone has smaller tiles: 16 of 128 x 128 are too few, and 10 times as many are enough."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(10, size, size, generator=generator).to(DEVICE) for _ in range(2))
    whole = launch_cuda(a, b)
    for replica in range(3):
        assert torch.equal(launch_cuda(a[replica], b[replica]), whole[replica])


def test_gradients():
    x, w = (torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    x, w = x.to(DEVICE).requires_grad_(), w.to(DEVICE).requires_grad_()
    dy = torch.ones(2, 64, 64, device=DEVICE)
    got = torch.autograd.grad(linear_fp32(x, w), (x, w), dy)
    expected = torch.autograd.grad((x.double() @ w.double().mT), (x, w), dy.double())
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
