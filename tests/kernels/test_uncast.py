"""Kernels that cast nothing take any number of rows and any sizes, because no block has to be whole."""

from __future__ import annotations

import pytest
import torch
from fused import BF16, activation_inputs, assert_beside, norm_inputs
from interpreter import DEVICE

from mxstudy.kernels.activation import launch_cuda as activation
from mxstudy.kernels.activation import launch_cuda_backward as activation_backward
from mxstudy.kernels.heads import flat_shape
from mxstudy.kernels.heads import launch_cuda as heads
from mxstudy.kernels.norm_cast import Normed
from mxstudy.kernels.norm_cast import launch_cuda as norm
from mxstudy.kernels.operators import UNREAD, checked_casts
from mxstudy.kernels.packing import pack
from mxstudy.numerics.cast import BlockCast

pytestmark = pytest.mark.integration
ROWS, COLUMNS = 5, 48


def nothing(shape, row=None, column=UNREAD):
    return checked_casts(shape, row, column, BlockCast())


def both(launch, operator, inputs, *options):
    """Return what the kernel computes, or on CPU the operator's arithmetic."""
    there = (None if x is None else x.to(DEVICE) for x in inputs)
    got, want = launch(*there, *options), operator(*inputs, *options)
    return [x.cpu() for x in got], want


def test_a_norm():
    x, gain, _ = norm_inputs((ROWS, COLUMNS), BF16)
    inputs, options = (x, x.flip(0), gain.to(BF16), None), (pack(Normed()), nothing(x.shape))
    got, want = both(norm, torch.ops.mxstudy.norm_cast_both, inputs, *options)
    assert torch.equal(got[2], want[2])
    torch.testing.assert_close(got[0].float(), want[0].float(), rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_an_activation(name):
    from mxstudy.kernels.activation import checked

    h, dz = activation_inputs(name, ROWS, COLUMNS)
    (known, _), casts = checked(h, name, BF16, BF16), nothing(dz.shape)
    got, want = both(activation, torch.ops.mxstudy.activation_cast_both, (h,), known, casts)
    assert_beside(got[0], want[0], name, True)
    again = nothing(dz.shape, UNREAD, None)
    backward = torch.ops.mxstudy.activation_backward_cast_both
    got, want = both(activation_backward, backward, (dz, h), known, casts, again)
    assert_beside(got[0], want[0], name, True)
    assert_beside(got[2], want[2], name, True)


def test_heads():
    d_qkv = [torch.randn(1, ROWS, n, 12, generator=torch.Generator().manual_seed(n)).to(BF16) for n in (4, 1, 1)]
    rope = torch.arange(ROWS)[:, None] / torch.arange(1, 7)
    casts = nothing(flat_shape(*d_qkv))
    got, want = both(heads, torch.ops.mxstudy.heads_cast_both, (*d_qkv, rope), casts)
    torch.testing.assert_close(got[0].float(), want[0].float(), rtol=2.0**-7, atol=1e-6)
