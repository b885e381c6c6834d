"""The loss in chunks equals that of whole logits: the same bits for one chunk, the same roundings for several.

Training computed whole logits before there were chunks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mxstudy.blocks import linear_cross_entropy as subject
from mxstudy.blocks.linear_cross_entropy import linear_cross_entropy
from mxstudy.config.casts import BlockCast, Gemms
from mxstudy.config.recipes import PRECISIONS
from mxstudy.numerics.gemms import Linear, add_wgrad, mx_linear
from mxstudy.reader import ConfigError

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS, SIZE, WORDS, DIVISOR = 200, 48, 96, 700  # 700 is no power of two: a gradient scaled late is rounded twice
PLAIN, CAST = Gemms(), PRECISIONS["mxfp8"].filled(BlockCast(block_size=8))


def drawn(dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(TOKENS, SIZE, dtype=dtype), torch.randn(WORDS, SIZE, dtype=dtype)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, WORDS, (TOKENS,))


def of_whole_logits(x: Tensor, weight: Tensor, targets: Tensor, linear: Linear) -> Tensor:
    return F.cross_entropy(mx_linear(x, weight, linear).float(), targets, reduction="sum") / DIVISOR


def chunks_of(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(subject, "LOGITS_AT_ONCE", tokens * WORDS)


@pytest.mark.parametrize("gemms", [PLAIN, CAST], ids=["plain", "cast"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_one_chunk_has_every_bit_of_whole_logits(
    monkeypatch: pytest.MonkeyPatch, gemms: Gemms, dtype: torch.dtype
) -> None:
    """Earlier runs are resumed to the bit. A recipe with casts is one chunk, however few tokens a chunk may have."""
    if gemms == CAST:
        chunks_of(monkeypatch, 64)
    x, weight, targets = drawn(dtype)
    loss, whole = (f(x, weight, targets, Linear(gemms)) for f in (of_whole_logits, given_divisor))
    assert_same_bits(loss, whole)
    wanted, found = (torch.autograd.grad(part, (x, weight)) for part in (loss, whole))
    for one, other in zip(wanted, found, strict=True):
        assert_same_bits(one, other)


def given_divisor(x: Tensor, weight: Tensor, targets: Tensor, linear: Linear) -> Tensor:
    return linear_cross_entropy(x, weight, targets, linear, DIVISOR)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_chunks_change_nothing_but_the_order_of_dws_sum(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """There are four chunks, the last with 8 tokens. dW is the FP32 sum over all tokens, rounded once."""
    x, weight, targets = drawn(dtype)
    whole = of_whole_logits(x, weight, targets, Linear(PLAIN))
    wanted_dx, _ = torch.autograd.grad(whole, (x, weight))
    chunks_of(monkeypatch, 64)
    loss = given_divisor(x, weight, targets, Linear(PLAIN))
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    assert_same_bits(loss, whole)
    assert_same_bits(dx, wanted_dx)

    logits = mx_linear(x, weight, Linear(PLAIN)).detach().requires_grad_()
    (dlogits,) = torch.autograd.grad(F.cross_entropy(logits.float(), targets, reduction="sum") / DIVISOR, logits)
    exact = dlogits.double().T @ x.double()
    assert dweight.dtype == dtype
    error = (dweight - exact).abs()
    if dtype == FP32:
        assert error.max() <= 1e-6 * exact.abs().max()
    else:  # an FP32 sum errs by far less than half a bf16 step, so only near a tie is another neighbour taken
        assert (dweight == exact.to(BF16)).float().mean() > 0.995
        assert (error <= exact.abs() * 2**-8 * 1.01 + 1e-9).all()


def test_a_sum_of_rounded_chunks_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = drawn()
    chunks_of(monkeypatch, 64)
    (dweight,) = torch.autograd.grad(given_divisor(x, weight, targets, Linear(PLAIN)), weight)
    parts = [
        torch.autograd.grad(given_divisor(*part, Linear(PLAIN)), weight)[0]
        for part in zip(x.split(64), [weight] * 4, targets.split(64), strict=True)
    ]
    assert (sum(parts[1:], parts[0]) == dweight).float().mean() < 0.9


class Largest(TorchDispatchMode):
    """Keeps the largest number of elements of a tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("gradients", [True, False])
def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch, gradients: bool) -> None:
    x, weight, targets = drawn()
    chunks_of(monkeypatch, 128)
    with Largest() as largest, torch.set_grad_enabled(gradients):
        loss = given_divisor(x, weight, targets, Linear(PLAIN))
        if gradients:
            loss.backward()
    assert largest.elements == 128 * WORDS
    assert loss.requires_grad == gradients
    with Largest() as whole:
        of_whole_logits(x, weight, targets, Linear(PLAIN))
    assert whole.elements == TOKENS * WORDS  # otherwise the class above would see nothing


@pytest.mark.parametrize(("vocabulary", "tokens"), [(128_256, 4096), (32_000, 16_384), (64, 2**20), (2**30, 1)])
def test_a_chunk_is_a_power_of_two_of_about_a_gibibyte(vocabulary: int, tokens: int) -> None:
    assert subject.tokens_at_once(Linear(PLAIN), 2**20, vocabulary) == tokens
    assert subject.tokens_at_once(Linear(CAST), 2**20, vocabulary) == 2**20
    assert subject.tokens_at_once(Linear(PLAIN), 1, vocabulary) == 1


@pytest.mark.gpu
def test_on_a_gpu_too_and_in_its_memory() -> None:
    """Several chunks of the usual size agree with whole logits, by autograd and torch's own cross-entropy."""
    tokens, size, words, gib = 5000, 256, 128_256, 2**30
    torch.manual_seed(0)
    x, weight = (torch.randn(n, size, dtype=BF16, device="cuda", requires_grad=True) for n in (tokens, words))
    targets = torch.randint(0, words, (tokens,), device="cuda")
    whole = of_whole_logits(x, weight, targets, Linear(PLAIN))
    wanted = torch.autograd.grad(whole, (x, weight))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = given_divisor(x, weight, targets, Linear(PLAIN))
    found = torch.autograd.grad(loss, (x, weight))
    assert torch.cuda.max_memory_allocated() - before < 1.3 * gib  # a chunk, dW in FP32 and bf16, and less
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other.double()).norm() < 2e-3 * other.double().norm()


def test_the_gradient_of_a_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(monkeypatch, 64)
    x, weight, targets = drawn()
    once, twice = (
        torch.autograd.grad(given_divisor(x, weight, targets, Linear(PLAIN)) * by, (x, weight)) for by in (1, 2)
    )
    for one, other in zip(once, twice, strict=True):
        assert_same_bits(one * 2, other)


def test_only_of_an_empty_recipe_is_dw_summed_over_chunks() -> None:
    x, _, _ = drawn()
    with pytest.raises(ConfigError, match="without casts and transforms"):
        add_wgrad(torch.zeros(WORDS, SIZE), torch.zeros(TOKENS, WORDS), x, Linear(CAST))
