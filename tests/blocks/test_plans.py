"""A block's plans are worked out before it is compiled, and a compiled block follows them when they change."""

from __future__ import annotations

import pytest
import torch
from each import each
from precision_files import of_file
from test_decoder_block import decoder
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.utils import counters

from mxstudy.blocks.plans import plan_of
from mxstudy.config.casts import OPERANDS, BlockCast, Cast, Gemms, Hadamard
from mxstudy.model.precision import apply_precision
from mxstudy.train.runtime import configure_torch

E4M3 = Cast(format="E4M3").filled(BlockCast())
BELOW = Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", chain="training").filled(BlockCast(16))
SMALL = ("precision.block_size=16",)


@each(
    ("cast", "transform", "fused", "kernel"),
    [
        (None, None, (True, None), "one"),
        (E4M3, None, (True, "E4M3"), "one"),
        (Cast(format="E4M3").filled(BlockCast(64)), None, (False, None), "one"),
        (BELOW, None, (False, None), "any"),
        (E4M3, Hadamard(size=16), (False, None), "any"),
        (None, Hadamard(size=16), (False, None), "any"),
    ],
)
def test_an_operand_is_made_by_the_cheapest_kernel(cast, transform, fused, kernel):
    transforms = dict.fromkeys(("forward_transform", "dgrad_transform", "wgrad_transform"), transform)
    plan = plan_of(Gemms(**dict.fromkeys(OPERANDS, cast), **transforms), BlockCast())
    for name in OPERANDS:
        operand = getattr(plan, name)
        assert (operand.is_fused, operand.fused_format) == fused
        assert (operand.plain is None, operand.own is None) == ((False, True) if kernel == "one" else (True, False))
        assert operand.axis == (-1 if name in ("forward_x", "forward_w", "dgrad_dh") else -2)


def traced(model):
    """Trace the first block, without making code of its graphs, and return a function that runs it on one input."""
    block = model.layers[0]
    run = torch.compile(lambda x, rope: block(x, rope)[0], backend="eager", fullgraph=True)
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    rope = torch.arange(64.0)[:, None] * torch.ones(8)

    def both(function):
        leaf = x.clone().requires_grad_()
        y = function(leaf, rope)
        return y.detach(), *torch.autograd.grad(y.float().square().sum(), [leaf])

    return lambda eager=False: both(lambda x, rope: block(x, rope)[0]) if eager else both(run)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
def test_a_compiled_block_follows_a_change_of_precision():
    """It is compiled anew for another precision only, also for one that differs in floats, and keeps earlier code."""
    configure_torch(compile=True)
    model = decoder(formats=of_file("mxfp8", *SMALL))
    run, found, graphs = traced(model), [], []
    for row in ("mxfp8", "nvfp4", "nvfp4_four_over_six", "mxfp8"):
        apply_precision(model, of_file(row, *SMALL), 0, "bf16", torch.device("cpu"), (7,))
        assert model.layers[0].fused is not None
        found.append(run())
        graphs.append(counters["stats"]["unique_graphs"])
        assert same(found[-1], run(eager=True))
    torch._dynamo.reset()
    assert not same(found[0], found[1])
    assert not same(found[1], found[2])
    assert same(found[0], found[3])
    assert graphs[0] < graphs[1] < graphs[2] == graphs[3]


@pytest.mark.slow
@each(("row", "most"), [("mxfp8", 600), ("nvfp4_parts", 1200)])
def test_a_compiler_traces_few_calls(row, most, monkeypatch):
    """Every call that it inlines takes milliseconds; to trace how plans follow from recipes took a thousand more."""
    configure_torch(compile=True)
    calls, inline = [], InliningInstructionTranslator.inline_call
    monkeypatch.setattr(
        InliningInstructionTranslator, "inline_call", lambda *a, **k: calls.append(1) or inline(*a, **k)
    )
    traced(decoder(formats=of_file(row, *SMALL)))()
    torch._dynamo.reset()
    assert 200 < len(calls) < most
