"""A norm's backward and its sums over rows agree with float64, with the same bits in every stack."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE

from mxstudy.kernels import RowNorm
from mxstudy.kernels.norm_backward import launch_cuda, norm_backward_add
from mxstudy.kernels.norm_cast import norm_cast_both
from mxstudy.kernels.operators import Tile
from mxstudy.numerics.cast import BlockCast
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def inputs(shape, dtype, centers, seed=0):
    """Return dy, x, mean, rms, gain and dout of a stack."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=generator) * 3 + 0.5).to(dtype)
    gain, bias = (torch.randn(shape[0], 1, shape[2], generator=generator) for _ in range(2))
    norm = norm_cast_both(x, gain, RowNorm(centers=centers), None, None, BlockCast(), bias=bias)
    dy, dout = (torch.randn(shape, generator=generator) for _ in range(2))
    return dy.bfloat16(), x, norm.mean, norm.rms, gain, dout.to(dtype)


def kernel(*tensors):
    return [t.cpu() for t in launch_cuda(*(None if t is None else t.to(DEVICE) for t in tensors))]


def by_autograd(dy, x, gain, dout, centers):
    """Return the gradients in float64 of sum(dy y) + sum(dout x)."""
    x, gain = x.double().requires_grad_(), gain.double().requires_grad_()
    shift = x - x.mean(-1, keepdim=True) if centers else x
    y = shift / (shift.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
    dx, dgain = torch.autograd.grad((dy.double() * y).sum() + (dout.double() * x).sum(), (x, gain))
    return dx, torch.stack([dgain, dy.double().sum(1, keepdim=True), dout.double().sum(1, keepdim=True)])


@pytest.mark.parametrize("shape", [(2, 64, 96), (1, 96, 512), (3, 32, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centers", [False, True])
def test_beside_float64(shape, dtype, centers):
    dy, x, mean, rms, gain, dout = inputs(shape, DTYPES[dtype], centers)
    want_dx, want_sums = by_autograd(dy, x, gain, dout, centers)
    for dx, sums in (kernel(dy, x, mean, rms, gain, dout), norm_backward_add(dy, x, mean, rms, gain, dout)):
        assert dx.dtype == x.dtype
        torch.testing.assert_close(sums.double(), want_sums, rtol=1e-5, atol=1e-4)
        step = 2.0**-7 if dtype == "bf16" else 1e-5  # rounded twice
        torch.testing.assert_close(dx.double(), want_dx, rtol=step, atol=step)


@pytest.mark.parametrize("most_programs", [1, 3, 5])
@pytest.mark.parametrize("sums", [1, 2, 3])
@pytest.mark.parametrize("columns", [96, 1024, 4096])
def test_many_rows(most_programs, sums, columns):
    """A program has several tiles, and the last one fewer than the others. dx is the same."""
    at = inputs((2, 7 * 8, columns), torch.bfloat16, True)
    dx, all_sums = kernel(*at)
    same, some_sums = [t.cpu() for t in launch_cuda(*(t.to(DEVICE) for t in at), sums, most_programs)]
    assert torch.equal(same, dx)
    torch.testing.assert_close(some_sums, all_sums[:sums], rtol=1e-5, atol=1e-4)
    cpu_dx, cpu_sums = norm_backward_add(*at, sums=sums)
    torch.testing.assert_close(cpu_sums, all_sums[:sums], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(cpu_dx.float(), dx.float(), rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize(("rows", "warps"), [(1, 2), (2, 4), (8, 1)])
def test_another_tile(rows, warps):
    at = inputs((2, 56, 512), torch.float32, True)
    dx, sums = kernel(*at)
    other_dx, other_sums = (t.cpu() for t in launch_cuda(*(t.to(DEVICE) for t in at), tile=Tile(rows, 512, warps)))
    torch.testing.assert_close(other_dx, dx, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other_sums, sums, rtol=1e-5, atol=1e-4)


def test_a_tile_whose_rows_do_not_divide_all_rows_is_refused():
    at = inputs((1, 56, 96), torch.float32, False)
    with pytest.raises(ConfigError, match="tile: 16 rows do not divide 56"):
        launch_cuda(*(None if t is None else t.to(DEVICE) for t in at), tile=Tile(16, 96, 4))


def test_no_bit_depends_on_the_stack():
    whole = inputs((3, 64, 96), torch.float32, True)
    dx, sums = kernel(*whole)
    for replica in range(3):
        alone_dx, alone_sums = kernel(*(t[replica : replica + 1] for t in whole))
        assert torch.equal(alone_dx[0], dx[replica])
        assert torch.equal(alone_sums[:, 0], sums[:, replica])
