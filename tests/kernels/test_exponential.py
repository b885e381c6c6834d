"""The exponential of kernels is Triton's own wherever that is no subnormal number."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE, triton

from mxstudy.kernels.device.exponential import exponential

pytestmark = pytest.mark.integration
SIZE = 2**12
TINY = torch.finfo(torch.float32).tiny
tl = triton.language


@triton.jit
def exponential_kernel(x_ptr, y_ptr, usual_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, exponential(x))
    tl.store(usual_ptr + at, tl.exp(x))


def test_every_bf16_number():
    x = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16).float().to(DEVICE)
    y, usual = torch.empty_like(x), torch.empty_like(x)
    exponential_kernel[(x.numel() // SIZE,)](x, y, usual, SIZE)
    assert torch.equal(y.isnan(), x.isnan())
    is_normal = usual >= TINY
    assert (y[usual < 0.99 * TINY] == 0).all()
    if DEVICE == "cuda":
        assert torch.equal(y[is_normal], usual[is_normal])
    else:  # here both are rounded to nearest, but the argument of the power of two is rounded before
        torch.testing.assert_close(y[usual > 1.01 * TINY], usual[usual > 1.01 * TINY], rtol=1e-5, atol=0)
