"""The kernel of cross-entropies agrees with torch's arithmetic, whose bits are those of torch's own cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from interpreter import DEVICE
from torch import Tensor

from mxstudy.kernels import cross_entropy_
from mxstudy.kernels.cross_entropy import launch_cuda
from mxstudy.kernels.operators import Tile
from mxstudy.reader import ConfigError

BF16, FP32 = torch.bfloat16, torch.float32
SCALE = 1 / 700
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP32])


def drawn(dtype: torch.dtype, words: int = 100, tokens: int = 9) -> tuple[Tensor, Tensor]:
    """Return logits, some of them large, and targets at both ends of the rows and between."""
    torch.manual_seed(0)
    logits = (torch.randn(tokens, words) * torch.logspace(-1, 2, tokens)[:, None]).to(dtype)
    return logits, torch.tensor([0, words - 1, *torch.randint(0, words, (tokens - 2,)).tolist()])


def by_kernel(logits: Tensor, targets: Tensor, scale: float | None, width: int) -> tuple[Tensor, Tensor]:
    logits = logits.clone().to(DEVICE)
    nats = launch_cuda(logits, targets.to(DEVICE), scale, Tile(1, width, 4))
    return nats.cpu(), logits.cpu()


@every_dtype
def test_it_has_the_bits_of_autograd(dtype: torch.dtype) -> None:
    logits, targets = drawn(dtype)
    leaf = logits.clone().requires_grad_()
    wanted = F.cross_entropy(leaf.float(), targets, reduction="none")
    wanted.backward(torch.full_like(wanted, SCALE))
    assert_same_bits(cross_entropy_(logits.clone(), targets), wanted)
    assert_same_bits(cross_entropy_(logits, targets, SCALE), wanted)
    assert_same_bits(logits, leaf.grad)


@every_dtype
@pytest.mark.parametrize("width", [32, 64, 128])
def test_the_kernel(dtype: torch.dtype, width: int) -> None:
    """A row takes several steps, the last of them not full, or a single step."""
    logits, targets = drawn(dtype)
    nats, gradient = by_kernel(logits, targets, SCALE, width)
    wanted = cross_entropy_(logits, targets, SCALE)
    assert torch.allclose(nats, wanted, rtol=1e-6, atol=1e-6)
    assert torch.allclose(gradient.float(), logits.float(), rtol=2**-8 if dtype == BF16 else 1e-5, atol=1e-9)


def test_logits_that_are_not_contiguous_are_refused() -> None:
    """The kernel reads one row after another, and would change numbers that are not the logits'."""
    logits, targets = drawn(BF16)
    beside = torch.cat((logits, logits), dim=1).to(DEVICE)
    with pytest.raises(ConfigError, match=r"logits: \[9, 100\] with strides \(200, 1\) is not contiguous; give a copy"):
        launch_cuda(beside[:, :100], targets.to(DEVICE), SCALE)


def test_without_a_scale_the_logits_stay() -> None:
    logits, targets = drawn(BF16)
    before = logits.clone()
    nats, after = by_kernel(logits, targets, None, 32)
    assert_same_bits(after, before)
    assert torch.allclose(nats, cross_entropy_(logits, targets), rtol=1e-6, atol=1e-6)
    assert_same_bits(logits, before)


@pytest.mark.parametrize("target", [-100, -1, 100])
def test_no_target_is_ignored(target: int) -> None:
    """Autograd's own cross-entropy ignores -100 silently."""
    logits, targets = drawn(BF16)
    targets[4] = target
    nats, gradient = by_kernel(logits, targets, SCALE, 32)
    assert nats.isnan().nonzero().tolist() == [[4]]
    assert gradient.isnan().all(1).nonzero().tolist() == [[4]]
    assert not gradient[torch.arange(9) != 4].isnan().any()
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        cross_entropy_(logits, targets, SCALE)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_lost(value: float) -> None:
    logits, targets = drawn(BF16)
    logits[3, 50] = value
    nats, gradient = by_kernel(logits, targets, SCALE, 32)
    assert nats.isfinite().logical_not().nonzero().tolist() == [[3]]
    assert gradient.isnan().any(1).nonzero().tolist() == [[3]]
    assert cross_entropy_(logits, targets).isfinite().logical_not().nonzero().tolist() == [[3]]


def test_a_word_that_cannot_be_has_no_probability() -> None:
    logits, targets = drawn(BF16)
    logits[:, 7] = -torch.inf
    targets[targets == 7] = 8
    nats, gradient = by_kernel(logits, targets, SCALE, 32)
    assert nats.isfinite().all()
    assert (gradient[:, 7] == 0).all()
