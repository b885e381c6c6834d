"""The kernel's update has the bits of Adam's formula in numpy's float32, replica by replica."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from interpreter import DEVICE

from mxstudy import config
from mxstudy.blocks.norm_mlp import hold
from mxstudy.kernels import adam_
from mxstudy.kernels.operators import Held
from mxstudy.numerics.cast import BlockCast
from mxstudy.students.optimizer import unbias

pytestmark = pytest.mark.integration
SIZES = [(3, 1, 96), (3, 64, 80)]  # the larger is no multiple of a tile


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("steps", [7, [0, 7, 100_000]])
def test_bits(size, steps):
    generator = torch.Generator().manual_seed(0)
    p, g, m, v = (torch.randn(size, generator=generator) for _ in range(4))
    v, g[0, 0, :5] = v.square() * 1e-3, 0.0
    lrs, alive, step = torch.tensor([1e-3, 0.0, 0.3]), torch.tensor([True, True, False]), torch.tensor(steps)
    adams = config.Adam()
    t = step.double().view(-1, 1, 1).numpy() + 1
    (beta1, beta2), one = adams.betas, np.float32(1)
    m_after = m.numpy() + (g.numpy() - m.numpy()) * np.float32(1 - beta1)
    v_after = v.numpy() * np.float32(beta2) + g.numpy() * g.numpy() * np.float32(1 - beta2)
    unbiased = m_after * (one / (1 - beta1**t)).astype(np.float32)
    root = np.sqrt(v_after) * (one / np.sqrt(1 - beta2**t)).astype(np.float32)
    after = p.numpy() - lrs.view(-1, 1, 1).numpy() * (unbiased / (root + np.float32(adams.eps)))

    on_device = [t.to(DEVICE) for t in (p, g, m, v)]
    corrections = tuple(t.to(DEVICE) for t in unbias(step.view(-1), adams.betas))
    p_, g_, m_, v_ = on_device
    adam_(p_, g_, (m_, v_), lrs.to(DEVICE), corrections, alive.to(DEVICE), adams.betas, adams.eps)
    for got, before, expected in ((p_, p, after), (m_, m, m_after), (v_, v, v_after)):
        assert_same_bits(got[:2].cpu(), torch.from_numpy(expected)[:2])
        assert_same_bits(got[2].cpu(), before[2])
    assert_same_bits(g_.cpu(), g)


@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
def test_what_it_casts_is_the_new_weight(gradient):
    """A replica that is not alive keeps its old weight."""
    generator = torch.Generator().manual_seed(0)
    p, g, m = (torch.randn(2, 64, 96, generator=generator) for _ in range(3))
    gemms = config.PRECISIONS["mx_mix"].filled(BlockCast())
    held = hold(p, gemms, BlockCast())
    before = [operand.detach().clone() for operand in held[:2]]
    ours, theirs = ([t.clone().to(DEVICE) for t in (p, m, m.square())] for _ in range(2))
    on_device = Held(*(operand.detach().to(DEVICE) for operand in held[:2]), held.casts)
    lrs, alive = torch.tensor([1e-2, 1e-2], device=DEVICE), torch.tensor([True, False], device=DEVICE)
    unbiased = tuple(t.to(DEVICE) for t in unbias(torch.tensor([3]), (0.9, 0.999)))
    rest = (lrs, unbiased, alive, (0.9, 0.999), 1e-8)
    g = g.to(gradient).to(DEVICE)
    adam_(ours[0], g, tuple(ours[1:]), *rest, on_device)
    adam_(theirs[0], g.float(), tuple(theirs[1:]), *rest)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one.cpu(), other.cpu())
    expected = hold(ours[0].cpu(), gemms, BlockCast())
    for got, new, old in zip(on_device[:2], expected[:2], before, strict=True):
        assert_same_bits(got[0].cpu(), new.detach()[0])
        assert_same_bits(got[1].cpu(), old[1])
