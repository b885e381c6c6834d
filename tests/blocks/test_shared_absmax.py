"""Both operands of a tensor share one absmax, found in one pass, unless their casts need different ones."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from each import each
from traced import without_code

from mxstudy import config
from mxstudy.blocks import operands
from mxstudy.blocks.operands import PlannedLinear
from mxstudy.blocks.plans import plan_of
from mxstudy.config.casts import OPERANDS, BlockCast, Cast, Gemms, Hadamard
from mxstudy.model.backends import apply_backends, plan_backends
from mxstudy.model.decoder import Decoder
from mxstudy.model.fusable import Target
from mxstudy.model.precision import apply_precision, evaluated
from mxstudy.model.random_streams import move_to
from mxstudy.train.runtime import configure_torch

BF16 = torch.bfloat16
HERE = Target(BF16, torch.device("cpu"))
MODEL = config.Decoder(hidden_size=64, ffn_size=96, num_layers=1, num_heads=4, num_kv_heads=2, vocab_size=128)
BELOW = Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", chain="training")
ALONE = replace(BELOW, outer_scale="none")
PLAIN = Cast(format="E4M3")
ROUNDED = replace(BELOW, pre_round=True)
SQUARE, DRAWN = replace(BELOW, two_dimensional=True), replace(BELOW, rounding="stochastic")
CHOICE = replace(BELOW, largest_scale=256.0, candidates=(1.0, 1.5))
SQUARE_CHOICE, HEADROOM = replace(CHOICE, two_dimensional=True), replace(BELOW, headroom=16 / 17)
TURN = Hadamard(size=16, signs="seed")
ALL = dict.fromkeys(OPERANDS, BELOW)
FP8 = Cast(format="E5M2", scale="none", outer_scale="tensor")

# A block has four linears, each with X, W and dH. Two of them read a norm. The columns say what differs from `ALL`,
# whether the gain is folded, and how many passes a step makes for the absmax of its 24 operands.
RECIPES = {
    "every operand": ({}, False, 12),
    "square weights and random gradients": (
        {"forward_w": SQUARE, "dgrad_w": SQUARE, "dgrad_dh": DRAWN, "wgrad_dh": DRAWN},
        False,
        12,
    ),
    "other elements and blocks": ({"wgrad_x": replace(BELOW, format="E4M3", block_size=32)}, False, 12),
    "one scale a tensor": (dict.fromkeys(OPERANDS, FP8), False, 12),
    "one scale a tensor beside scales of blocks": ({"dgrad_w": FP8, "wgrad_dh": FP8, "forward_x": FP8}, False, 12),
    "a choice of scales": (
        {"forward_x": CHOICE, "forward_w": SQUARE_CHOICE, "dgrad_w": SQUARE_CHOICE, "wgrad_dh": HEADROOM},
        False,
        12,
    ),
    "pre-rounded": (dict.fromkeys(OPERANDS, ROUNDED), False, 12),
    "a folded gain": ({}, True, 12 + 2),
    "X pre-rounded in the forward": ({"forward_x": ROUNDED}, False, 12 + 4),
    "X pre-rounded in wgrad": ({"wgrad_x": ROUNDED}, False, 12 + 4),
    "wgrad's transform": ({"wgrad_transform": TURN}, False, 12 + 8),
    "the forward's transform": ({"forward_transform": TURN}, False, 12 + 8),
    "dgrad's transform": ({"dgrad_transform": TURN}, False, 12 + 8),
    "every transform": ({f"{gemm}_transform": TURN for gemm in ("forward", "dgrad", "wgrad")}, False, 24),
    "wgrad without it": ({"wgrad_dh": ALONE, "wgrad_x": PLAIN}, False, 12),
    "wgrad in bf16": ({"wgrad_dh": None, "wgrad_x": None}, False, 12),
    "the forward alone": (dict.fromkeys(OPERANDS[2:], PLAIN), False, 8),
}
MISLED = [name for name, (changes, *_) in RECIPES.items() if "transform" in str(changes) or "X pre" in name]


def decoder(name):
    """Return a decoder with gains that are not 1, computed by the reference."""
    changes, folds, _ = RECIPES[name]
    gemms = Gemms(**ALL | changes)
    precision = config.Precision(
        schedule=(config.PrecisionRow(plan={"layers.*": "own"}),),
        recipes={"own": gemms},
        backend="reference",
        block_size=16,
    )
    model = Decoder(MODEL, config.RMSNorm(fold_gain=folds), precision.settings, BF16)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 3)
    apply_precision(model, precision, 0, "bf16", HERE.device, (7,))
    move_to(model, 5, 64)
    return model


def fused(model):
    apply_backends(model, plan_backends(model, "fused", HERE), HERE)
    assert all(block.fused is not None for block in model.layers)
    return model


def linear_with(gemms):
    return PlannedLinear(plan_of(gemms.filled(BlockCast(16)), BlockCast(16)))


def tokens():
    return torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(2))


def step(model):
    loss = torch.nn.functional.cross_entropy(model(tokens()).float().flatten(0, 1), tokens().flatten())
    return [loss.detach(), *torch.autograd.grad(loss * 2**12, list(model.parameters()))]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def passes(monkeypatch):
    """Return a list that gets one entry for every absmax that is found, compiled or not."""
    kernel = import_module("mxstudy.kernels.cast_any")
    seen, find = [], kernel.largest_magnitude
    monkeypatch.setattr(kernel, "largest_magnitude", lambda x: seen.append(x.shape) or find(x))
    return seen


@pytest.mark.integration
@each("name", RECIPES)
def test_a_step_has_the_references_bits_in_that_many_passes(name, passes):
    passes.clear()
    model = decoder(name)
    expected = step(model)
    assert not passes
    assert same(step(fused(model)), expected)
    assert len(passes) == RECIPES[name][2]


@pytest.mark.integration
@pytest.mark.parametrize("name", MISLED)
def test_a_pass_that_is_shared_too_often_is_found_out(name, monkeypatch):
    """The test above fails if every operand gets the absmax of the tensor itself."""
    model = decoder(name)
    expected, shared = step(model), operands.shared_absmax

    def of_all(x, linear, operand, **parts):
        return shared(x, linear_with(Gemms(**ALL)), operand, **parts)

    monkeypatch.setattr("mxstudy.blocks.decoder_block.shared_absmax", of_all)
    monkeypatch.setattr(operands, "shared_absmax", of_all)
    assert not same(step(fused(model)), expected)


@pytest.mark.integration
@each(
    ("name", "kernels"),
    [
        ("every operand", 4),
        ("a choice of scales", 4),
        ("pre-rounded", 4),
        ("one scale a tensor beside scales of blocks", 4),
        ("the forward's transform", 4),
        ("square weights and random gradients", 0),
        ("wgrad's transform", 0),
        ("dgrad's transform", 0),
        ("wgrad without it", 0),
    ],
)
def test_a_gradient_is_read_once_for_both_casts(name, kernels, monkeypatch):
    """One pass reads a gradient for both casts, unless one of them is random or transformed."""
    calls, both = [], operands.cast_any_both
    with monkeypatch.context() as patch:
        patch.setattr(operands, "cast_any_both", lambda dh, *given: calls.append(dh.shape) or both(dh, *given))
        step(fused(decoder(name)))
    assert len(calls) == kernels


@pytest.mark.integration
def test_a_folded_weight_has_another_absmax(monkeypatch):
    model = decoder("a folded gain")
    expected = step(model)
    monkeypatch.setattr(
        "mxstudy.blocks.decoder_block.weight_absmax",
        lambda weight, linear, gain=None: operands.shared_absmax(weight, linear, "forward_w"),
    )
    assert not same(step(fused(model)), expected)


@pytest.mark.integration
def test_an_evaluation_has_one_scale_a_row(passes):
    """A sequence's result depends on that sequence alone, after a training step and before the next."""
    model = decoder("every operand")
    with evaluated(model):
        expected = model(tokens())
    before = step(fused(model))
    passes.clear()
    with torch.no_grad(), evaluated(model):
        assert torch.equal(model(tokens()), expected)
        assert torch.equal(model(tokens()[:1]), expected[:1])
    assert not passes
    assert same(step(model), before)


@each("scale", ["row", "none"])
@each("operand", ["forward_x", "wgrad_x"])
def test_operands_below_different_scales_share_nothing(scale, operand):
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    both = Gemms(**ALL)
    assert torch.equal(operands.shared_absmax(x, linear_with(both), "forward_x"), x.float().abs().max())
    one = replace(both, **{operand: replace(BELOW, outer_scale=scale)})
    assert operands.shared_absmax(x, linear_with(one), "forward_x") is None


@pytest.mark.slow
@each("name", ["every operand", "wgrad's transform"])
def test_compiled_it_is_found_as_often(name, passes):
    """A compiler neither finds an absmax again in the backward nor moves an operand's own pass out of it."""
    configure_torch(compile=True)
    block = fused(decoder(name)).layers[0]
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    rope = torch.arange(32.0)[:, None] * torch.ones(8)

    def forward(x):
        return block.forward_fused(x, rope, None, block.fused)[0]

    found, counts = [], []
    for run in (forward, torch.compile(forward, backend=without_code, fullgraph=True)):
        passes.clear()
        y = run(x)
        counts.append(len(passes))
        found.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *block.parameters()])])
        counts.append(len(passes))
    torch._dynamo.reset()
    assert same(*found)
    assert counts == [8, RECIPES[name][2]] * 2
