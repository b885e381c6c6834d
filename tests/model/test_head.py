"""The head gives logits, or with targets their loss, in training too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mxstudy import config
from mxstudy.blocks import linear_cross_entropy as chunked
from mxstudy.model.backends import apply_backends, plan_backends
from mxstudy.model.fusable import Backend, Target
from mxstudy.reader import ConfigError
from mxstudy.train.loop import TrainingRun, train_step, validate

QUANTISED = replace(tiny.CONFIG, precision=replace(tiny.precision((0, "mxfp8")), head=True))
WORDS = 160  # unlike any other size
OF_WORDS = replace(tiny.CONFIG, model=replace(tiny.MODEL, vocab_size=WORDS))
EXPERTS = replace(OF_WORDS, model=replace(OF_WORDS.model, mlp="moe", num_layers=1, moe=config.MoE(balance="loss")))
RANDOM = replace(
    tiny.CONFIG, precision=replace(tiny.precision((0, "mxfp8")), head=True, rounding="stochastic", backend="reference")
)


def first_micro_batch(run: TrainingRun) -> tuple[Tensor, Tensor]:
    return next(run.micro_batches(0))


@pytest.mark.parametrize("settings", [tiny.CONFIG, QUANTISED, RANDOM], ids=["plain", "quantised", "random"])
def test_the_loss_has_the_bits_of_whole_logits(settings: config.Pretrain) -> None:
    """All gradients are those of runs recorded before a head could return a loss, too."""
    run, _ = tiny.build(settings)
    tokens, targets = first_micro_batch(run)
    logits = run.model(tokens)
    assert logits.shape == (*tokens.shape, settings.model.vocab_size)
    wanted = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / run.tokens_per_step
    loss = run.model(tokens, targets, run.tokens_per_step)
    assert_same_bits(loss, wanted)
    weights = list(run.model.parameters())
    for one, other in zip(*(torch.autograd.grad(of, weights) for of in (loss, wanted)), strict=True):
        assert_same_bits(one, other)


PADDED = replace(
    QUANTISED,
    model=replace(tiny.MODEL, vocab_size=100),
    precision=replace(
        QUANTISED.precision, pad_blocks=True, scale_rule="floor", rounding="away", operand_pre_round=True
    ),
)


@pytest.mark.parametrize("settings", [QUANTISED, PADDED], ids=["whole blocks", "padded"])
def test_by_kernels_a_quantised_head_has_the_bits_of_the_reference(settings: config.Pretrain) -> None:
    run, _ = tiny.build(settings)
    tokens, targets = (ids % settings.model.vocab_size for ids in first_micro_batch(run))
    found = []
    for run.model.output.casts_by_kernel in (False, True):
        loss = run.model(tokens, targets, run.tokens_per_step)
        found.append([loss, *torch.autograd.grad(loss, list(run.model.parameters()))])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("settings", "device", "why"),
    [
        (QUANTISED, "cuda", None),
        (PADDED, "cuda", None),
        (QUANTISED, "cpu", "outside blocks kernels make operands only on a GPU, and only in bf16"),
        (RANDOM, "cuda", "kernels of single casts do not support forward_x.rounding=stochastic, only even or away"),
    ],
)
def test_on_a_gpu_kernels_cast_for_a_quantised_head(settings: config.Pretrain, device: str, why: str | None) -> None:
    run, _ = tiny.build(settings)
    target = Target(torch.bfloat16, torch.device(device))
    backends = plan_backends(run.model, "auto", target)
    assert backends["output"] == (Backend("fused") if why is None else Backend("reference", why))
    apply_backends(run.model, backends, target)
    assert run.model.output.casts_by_kernel == (why is None)


class Shapes(TorchDispatchMode):
    """Counts the tensors that have a column for every word, and a row for every token of a micro-batch."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self.found += isinstance(leaf, Tensor) and leaf.shape[-1:] == (WORDS,) and leaf.numel() == 4 * 64 * WORDS
        return result


def test_a_step_has_no_tensor_of_tokens_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = tiny.build(OF_WORDS)
    with Shapes() as whole:
        before = train_step(run, 0)
    assert whole.found  # one chunk
    monkeypatch.setattr(chunked, "LOGITS_AT_ONCE", 100 * WORDS)
    run, _ = tiny.build(OF_WORDS)
    with Shapes() as shapes:
        view = train_step(run, 0)
        validate(run)
    assert shapes.found == 0
    assert view.loss == before.loss
    assert view.grad_norm == pytest.approx(before.grad_norm, rel=1e-4)


class Products(TorchDispatchMode):
    """Counts the products of a whole gradient of the head's weight and one number."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mul.Tensor:
            self.found += args[0].shape == (WORDS, OF_WORDS.model.hidden_size) and args[1].ndim == 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [OF_WORDS, EXPERTS], ids=["dense", "with an auxiliary loss"])
def test_a_step_reads_and_writes_no_gradient_of_the_head_only_to_multiply_it_by_1(settings: config.Pretrain) -> None:
    run, _ = tiny.build(settings)
    tokens, targets = first_micro_batch(run)
    with Products() as products:
        run.model(tokens, targets).backward()
        assert products.found == 1  # torch's own 1, which only the GPU could tell from another number
        train_step(run, 0)
    assert products.found == 1


def test_a_hook_gets_logits_or_an_error() -> None:
    run, _ = tiny.build()
    tokens, targets = first_micro_batch(run)
    seen = []
    run.model.output.register_forward_hook(lambda head, inputs, logits: seen.append(logits.shape))
    run.model(tokens)
    assert seen == [(4, 64, tiny.MODEL.vocab_size)]
    with pytest.raises(ConfigError, match="a hook of the head would get the loss for logits"):
        run.model(tokens, targets)
