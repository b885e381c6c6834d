"""Recipes with every ingredient have the same bits eager and compiled: forward, dX and dW of a linear."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from test_every_field import decoder, same, step, take
from torch._dynamo.utils import counters

from mxstudy.config.casts import BlockCast, Cast, Gemms, Hadamard
from mxstudy.model.random_streams import move_to
from mxstudy.numerics.gemms import Linear, mx_linear
from mxstudy.numerics.random_bits import STREAMS, Random, stream_key
from mxstudy.train.runtime import configure_torch

pytestmark = pytest.mark.slow

E4M3, E2M1 = Cast(format="E4M3"), Cast(format="E2M1")
NVFP4 = Cast(format="E2M1", block_size=16, scale="E4M3", outer_scale="tensor")
TRAINING = replace(NVFP4, chain="training")
RECIPES = {
    "stochastic, square, transformed": Gemms(
        forward_x=Cast(format="E4M3", scale_rule="even", pre_round=True, rounding="away"),
        forward_w=Cast(format="E4M3", two_dimensional=True, block_size=16),
        dgrad_dh=Cast(format="E2M1", rounding="stochastic", headroom=0.75),
        dgrad_w=Cast(format="E4M3", two_dimensional=True, block_size=16),
        wgrad_dh=Cast(format="E2M1", rounding="stochastic", random_bits=8),
        wgrad_x=E2M1,
        wgrad_transform=Hadamard(size=16, signs="call"),
    ),
    "four over six, of the forward's": Gemms(
        forward_x=Cast(
            format="E2M1", block_size=16, scale="E4M3", outer_scale="row", candidates=(1.0, 1.5), mask_clipped=True
        ),
        forward_w=replace(TRAINING, candidates=(1.0, 1.5), largest_scale=256.0),
        dgrad_dh=TRAINING,
        dgrad_w=Cast(format="E2M1", block_size=16, scale="E4M3", outer_scale="tensor", source="forward"),
        wgrad_dh=NVFP4,
        wgrad_x=Cast(format="E2M1", scale_rule="floor", source="forward"),
        forward_transform=Hadamard(size=32, signs="seed"),
    ),
    "standard deviation, FP32 scales": Gemms(
        forward_x=Cast(format="E2M1", statistic="std", scale_rule="floor", mask_clipped=True),
        forward_w=Cast(format="E2M1", statistic="std", scale_rule="floor", pad=True),
        dgrad_dh=Cast(format="E4M3", scale="FP32", block_size=64),
        dgrad_w=Cast(format="E4M3", scale="FP32", block_size=64, two_dimensional=True),
        wgrad_dh=Cast(format="E5M2", scale="none", outer_scale="tensor"),
        wgrad_x=Cast(
            format="E2M1",
            block_size=16,
            scale="E4M3",
            outer_scale="bound",
            candidates=(1.0, 1.5),
            candidate_error="mae",
        ),
        dgrad_transform=Hadamard(size=128, vector=(1, -1, -1, -1) * 32, signs_after=True),
    ),
}


def test_the_recipes_have_every_field() -> None:
    """Each field of a cast has some value that is not its default."""
    casts = [cast for gemms in RECIPES.values() for _, cast in gemms.casts()]
    for field in fields(Cast):
        assert any(getattr(cast, field.name) != field.default for cast in casts), field.name


@pytest.mark.parametrize("name", RECIPES)
def test_eager_and_compiled_have_the_same_bits(name: str) -> None:
    configure_torch(compile=True)
    gemms = RECIPES[name].filled(BlockCast())
    keys = torch.tensor([stream_key(0, stream) for stream in STREAMS])
    linear = Linear(gemms, Random(keys, torch.tensor([[3, 128], [3, 0], [0, 0]])))
    generator = torch.Generator().manual_seed(0)
    x, weight, dh = (torch.randn(shape, generator=generator) for shape in ((128, 128), (256, 128), (128, 256)))

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return mx_linear(x, weight, linear)

    found = []
    for function in (run, torch.compile(run, fullgraph=True)):
        leaves = x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
        h = function(*leaves)
        found.append([h.detach(), *torch.autograd.grad(h, leaves, dh.bfloat16())])
    for eager, compiled in zip(*found, strict=True):
        assert torch.equal(eager, compiled)
        assert eager.isfinite().all()
        assert eager.abs().sum() > 0


def test_a_fused_block_is_compiled_once_for_all_steps() -> None:
    """Compiled, it has the bits of the reference, and a new step draws anew without compiling anew."""
    configure_torch(compile=True)
    gradient, weight = Cast(format="E4M3", rounding="stochastic"), RECIPES["stochastic, square, transformed"].forward_w
    gemms = Gemms(
        forward_x=E4M3,
        forward_w=weight,
        dgrad_dh=gradient,
        dgrad_w=weight,
        wgrad_dh=gradient,
        wgrad_x=E4M3,
        wgrad_transform=Hadamard(size=16, signs="step"),
    )
    model = decoder(gemms)
    reference = step(model)
    take(model)
    model.layers[0].compile(fullgraph=True)
    compiled = step(model)
    assert same(compiled, reference)
    graphs = counters["stats"]["unique_graphs"]
    move_to(model, 6, 64)
    assert not same(step(model), compiled)
    assert counters["stats"]["unique_graphs"] == graphs
