"""On a GPU the fused backend computes each new ingredient as the reference does, but for the order of sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_every_field import MODEL
from torch import Tensor

from mxstudy import config
from mxstudy.config.casts import Cast, Gemms, Hadamard
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import apply_precision
from mxstudy.model.random_streams import move_to
from mxstudy.train.runtime import configure_torch

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
E2M1 = Cast(format="E2M1")
STOCHASTIC, SQUARE = replace(E2M1, rounding="stochastic"), replace(E2M1, block_size=16, two_dimensional=True)
TWO_LEVELS = Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", chain="training", block_size=16)
SQUARE_LEVELS = replace(TWO_LEVELS, two_dimensional=True)
INGREDIENTS: dict[str, dict[str, Cast | Hadamard]] = {
    "stochastic rounding": {"dgrad_dh": STOCHASTIC, "wgrad_dh": STOCHASTIC},
    "stochastic rounding, 8 bits": {"wgrad_x": replace(STOCHASTIC, random_bits=8), "forward_x": STOCHASTIC},
    "square weights": {"forward_w": SQUARE, "dgrad_w": SQUARE},
    "transform of wgrad": {"wgrad_transform": Hadamard(size=16, signs="step")},
    "transforms of all": {  # larger ones take the compiler minutes, because each shape has a kernel
        "forward_transform": Hadamard(size=16),
        "dgrad_transform": Hadamard(size=16, signs="seed"),
        "wgrad_transform": Hadamard(size=32, signs="call"),
    },
    "NVFP4": {
        "forward_x": TWO_LEVELS,
        "forward_w": SQUARE_LEVELS,
        "dgrad_dh": replace(TWO_LEVELS, rounding="stochastic"),
        "dgrad_w": SQUARE_LEVELS,
        "wgrad_dh": replace(TWO_LEVELS, rounding="stochastic"),
        "wgrad_x": TWO_LEVELS,
        "wgrad_transform": Hadamard(size=16, vector=(1, 1, 1, -1, 1, -1, -1, -1) * 2),
    },
}


def recipe(**changed: Cast | Hadamard) -> Gemms:
    operands = ("forward_x", "forward_w", "dgrad_dh", "dgrad_w", "wgrad_dh", "wgrad_x")
    return Gemms(**{**dict.fromkeys(operands, E2M1), **changed})  # type: ignore[arg-type]


def built(gemms: Gemms, backend: str, step: int = 5, compiles: bool = False) -> tuple[Decoder, Tensor]:
    """Return a model whose blocks have these GEMMs, and its tokens [4, 128]."""
    precision = config.Precision(
        schedule=(config.PrecisionRow(plan={"layers.*": "own"}),), recipes={"own": gemms}, backend=backend
    )
    model = Decoder(MODEL, config.RMSNorm(), precision.settings, torch.bfloat16).to(DEVICE)
    model.init_weights(0)
    if compiles:
        configure_torch(compile=True)
    apply_precision(model, precision, 0, "bf16", DEVICE, (7,), compiles)
    move_to(model, step, 64)
    for block in model.layers:
        assert (block.fused is None) == (backend == "reference")
        if compiles:
            block.compile()
    return model, torch.randint(128, (4, 128), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def gradients(gemms: Gemms, backend: str, step: int = 5, compiles: bool = False) -> list[Tensor]:
    model, tokens = built(gemms, backend, step, compiles)
    loss = torch.nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    return list(torch.autograd.grad(loss, list(model.layers.parameters())))


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest relative distance of a gradient, in the Euclidean norm."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("vocabulary", [128, 100])
def test_a_quantised_head_is_the_references(vocabulary: int) -> None:
    """Compare loss and gradients; with 100 words zeros fill the last block of dgrad's operands."""
    plan = (config.PrecisionRow(plan={"layers.*": "mxfp8"}),)
    found = []
    for backend in ("auto", "reference"):
        precision = config.Precision(schedule=plan, backend=backend, head=True, pad_blocks=True)
        sized = replace(MODEL, vocab_size=vocabulary)
        model = Decoder(sized, config.RMSNorm(), precision.settings, torch.bfloat16).to(DEVICE)
        model.init_weights(0)
        apply_precision(model, precision, 0, "bf16", DEVICE)
        assert model.output.casts_by_kernel == (backend == "auto")
        tokens = torch.randint(vocabulary, (4, 128), generator=torch.Generator().manual_seed(1)).to(DEVICE)
        loss = model(tokens, tokens, tokens.numel())
        found.append([loss[None], *torch.autograd.grad(loss, list(model.parameters()))])
    assert distance(*found) < 0.01


@pytest.mark.parametrize("name", INGREDIENTS)
def test_an_ingredient_counts_and_is_the_references(name: str) -> None:
    """The two backends are much nearer to each other than the ingredient's effect."""
    fused = gradients(recipe(**INGREDIENTS[name]), "fused")
    effect = distance(fused, gradients(recipe(), "fused"))
    between = distance(fused, gradients(recipe(**INGREDIENTS[name]), "reference"))
    assert between < effect / 4, (between, effect)


def test_compiled_roads_draw_the_same() -> None:
    gemms = recipe(**INGREDIENTS["stochastic rounding"])
    eager, compiled = (gradients(gemms, "fused", compiles=compiles) for compiles in (False, True))
    other = gradients(gemms, "fused", step=6)
    assert distance(eager, compiled) < distance(eager, other) / 4


@pytest.mark.parametrize("gemms", [Gemms(), recipe()], ids=["bf16", "E2M1"])
def test_compiled_blocks_have_the_bits_of_eager_mode(gemms: Gemms) -> None:
    """A block's last product is rounded before it is added, in both; Inductor's own passes would add it in FP32."""
    with torch.no_grad():
        eager, compiled = (
            model(tokens) for model, tokens in (built(gemms, "fused", compiles=c) for c in (False, True))
        )
    assert torch.equal(eager, compiled)
