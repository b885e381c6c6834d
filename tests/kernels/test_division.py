"""Fewer operations give the bits of a division."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE, triton

from mxstudy.kernels.device.activation import one_over
from mxstudy.kernels.device.division import quotient

pytestmark = pytest.mark.integration
SIZE = 2**12
tl = triton.language


@triton.jit
def quotient_kernel(x_ptr, rms_ptr, y_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    rms = tl.load(rms_ptr + at)
    tl.store(y_ptr + at, quotient(tl.load(x_ptr + at), rms, tl.div_rn(tl.zeros_like(rms) + 1.0, rms)))


def test_quotients_of_float32():
    """The significands are any, nearly one or nearly two, with zeros of both signs."""
    generator = torch.Generator().manual_seed(0)
    count = 2**20
    significands = 1 + torch.randint(0, 2**23, (2, count), generator=generator) * 2.0**-23
    ends = 1 + torch.tensor([0, 1, 2, 2**23 - 2, 2**23 - 1]) * 2.0**-23
    significands[0, :4096:2] = ends[torch.randint(0, 5, (2048,), generator=generator)]
    significands[1, 1:4096] = ends[torch.randint(0, 5, (4095,), generator=generator)]
    x = significands[0] * 2.0 ** torch.randint(-80, 60, (count,), generator=generator)
    x = x * (1 - 2 * torch.randint(0, 2, (count,), generator=generator))
    x[:2] = torch.tensor([0.0, -0.0])
    rms = significands[1] * 2.0 ** torch.randint(-40, 40, (count,), generator=generator)
    x, rms = x.to(DEVICE), rms.to(DEVICE)
    y = torch.empty_like(x)
    quotient_kernel[(count // SIZE,)](x, rms, y, SIZE)
    assert torch.equal(y.view(torch.int32), (x / rms).view(torch.int32))


@triton.jit
def one_over_kernel(x_ptr, d_ptr, y_ptr, divided_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x, d = tl.load(x_ptr + at), tl.load(d_ptr + at)
    r, s = one_over(d)
    tl.store(y_ptr + at, r * (x * s))
    tl.store(divided_ptr + at, x / d)


def test_what_is_divided_by_one_and_more():
    """A division is approximate on a GPU. The interpreter rounds both correctly."""
    generator = torch.Generator().manual_seed(0)
    count = 2**14
    x = torch.randn(count, generator=generator) * 100
    d = 1 + (torch.randn(count, generator=generator) * 40).exp()
    d[:4] = torch.tensor([1.0, torch.inf, torch.nan, 2.0**127])
    x, d = x.to(DEVICE), d.to(DEVICE)
    y, divided = torch.empty_like(x), torch.empty_like(x)
    one_over_kernel[(count // SIZE,)](x, d, y, divided, SIZE, enable_fp_fusion=False)
    steps = 0 if x.is_cuda else 2.0**-22
    torch.testing.assert_close(y, divided, rtol=steps, atol=2.0**-149, equal_nan=True)
