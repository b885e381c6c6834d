"""The three GEMMs of a linear agree with reference_recipes.py, for recipes with every ingredient."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from each import each
from reference_recipes import Reference, assert_within

from mxstudy.config.casts import OPERANDS, TRANSFORMS, BlockCast, Cast, Gemms, Hadamard
from mxstudy.model.linear import MXLinear
from mxstudy.model.random_streams import give_streams, move_to
from mxstudy.numerics.gemms import Bounds, Linear, dgrad_gemm, forward_gemm, mx_linear, wgrad_gemm
from mxstudy.reader import ConfigError

TOKENS, IN, OUT = 32, 64, 96  # all different, and multiples of 32
SEED, NAME, STEP, FIRST_ROW = 11, "layers.3.mlp.down", 5, 192
TE_VECTOR = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

E4M3, E2M1 = Cast(format="E4M3"), Cast(format="E2M1")
NVFP4 = Cast(format="E2M1", block_size=16, scale="E4M3", outer_scale="tensor")
SR = Cast(format="E2M1", scale_rule="floor", headroom=0.75, rounding="stochastic")
QUARTET = Cast(format="E2M1", scale_rule="floor", statistic="std", mask_clipped=True)
TRAINING = replace(NVFP4, chain="training")
FOUR_OVER_SIX = replace(TRAINING, candidates=(1.0, 1.5), largest_scale=256.0)


def everywhere(cast: Cast | None, **others: Any) -> Gemms:
    return Gemms(**{**dict.fromkeys(OPERANDS, cast), **others})


RECIPES = {
    "mxfp4": everywhere(E2M1),
    "NVIDIA": everywhere(
        TRAINING,
        forward_w=replace(TRAINING, two_dimensional=True),
        dgrad_w=replace(TRAINING, two_dimensional=True),
        dgrad_dh=replace(TRAINING, rounding="stochastic", random_bits=8),
        wgrad_dh=replace(TRAINING, rounding="stochastic", random_bits=8),
        wgrad_transform=Hadamard(size=16, vector=TE_VECTOR),
    ),
    "Tseng": everywhere(
        SR,
        forward_x=None,
        forward_w=None,
        dgrad_transform=Hadamard(size=32, signs="call"),
        wgrad_transform=Hadamard(size=16, signs="call"),
    ),
    "Quartet": Gemms(
        forward_x=QUARTET,
        forward_w=QUARTET,
        dgrad_dh=SR,
        dgrad_w=replace(SR, source="forward"),
        wgrad_dh=SR,
        wgrad_x=replace(SR, source="forward"),
        forward_transform=Hadamard(size=32),
        dgrad_transform=Hadamard(size=32, signs="step", signs_after=True),
        wgrad_transform=Hadamard(size=32, signs="step", signs_after=True),
    ),
    "masks without a transform": everywhere(E4M3, forward_x=QUARTET, forward_w=QUARTET),
    "masks in the rotated space": everywhere(
        E4M3, forward_x=QUARTET, forward_w=QUARTET, forward_transform=Hadamard(size=16, signs="seed")
    ),
    "signs after the forward's transform": everywhere(
        E4M3,
        forward_x=QUARTET,
        dgrad_w=replace(E4M3, source="forward"),
        forward_transform=Hadamard(size=32, signs="seed", signs_after=True),
    ),
    "a forward that is random": everywhere(
        replace(E2M1, rounding="stochastic"),
        dgrad_w=replace(E4M3, source="forward"),
        wgrad_x=replace(E4M3, source="forward"),
    ),
    "four over six, of the forward's": everywhere(
        FOUR_OVER_SIX,
        dgrad_w=replace(NVFP4, source="forward"),
        wgrad_x=replace(NVFP4, source="forward", rounding="stochastic"),
        forward_transform=Hadamard(size=16, signs="seed"),
    ),
    "FP32 scales": everywhere(
        Cast(format="E4M3", scale="FP32"),
        forward_w=Cast(format="E4M3", scale="FP32", two_dimensional=True),
        dgrad_w=Cast(format="E4M3", scale="FP32", two_dimensional=True),
    ),
    "FP32 scales beside others": Gemms(
        forward_x=Cast(format="E4M3", scale="FP32"),
        forward_w=NVFP4,
        dgrad_dh=replace(SR, rounding="even"),
        dgrad_w=Cast(format="E4M3", scale="FP32", block_size=16),
        wgrad_dh=Cast(format="E4M3", scale="FP32", block_size=16, rounding="stochastic"),
        wgrad_transform=Hadamard(size=16),
    ),
    "a scale a row": everywhere(
        replace(NVFP4, outer_scale="row"),
        forward_x=replace(NVFP4, outer_scale="bound"),  # of a linear without a norm
        forward_w=replace(TRAINING, outer_scale="row"),
        dgrad_dh=Cast(format="E5M2", scale="none", outer_scale="row"),
        wgrad_x=Cast(format="E4M3", scale="none", outer_scale="tensor"),
    ),
    "filled up": everywhere(Cast(format="E2M1", block_size=64, pad=True, scale_rule="ceil", pre_round=True)),
}
every_recipe = each("name", RECIPES)


def numbers(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return x, weight and dH: normals times 2^row, from -2 to 2, and times 2^column."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        sizes = [torch.randint(-2, 3, shape, generator=generator) for shape in ((rows, 1), (1, columns))]
        return torch.ldexp(torch.randn(rows, columns, generator=generator), sizes[0] + sizes[1]).to(dtype)

    return draw(TOKENS, IN), draw(OUT, IN), draw(TOKENS, OUT)


def linear_of(gemms: Gemms, weight: torch.Tensor, seeds: tuple[int, ...] = (SEED,), name: str = NAME) -> MXLinear:
    """Return a linear in the middle of the training."""
    linear = MXLinear(IN, OUT, 1.0)
    linear.weight = torch.nn.Parameter(weight.clone())
    linear.gemms = gemms.filled(BlockCast())
    give_streams(linear, {name: linear}, seeds)
    move_to(linear, STEP, FIRST_ROW)
    return linear


def results(linear: MXLinear, x: torch.Tensor, dh: torch.Tensor) -> list[torch.Tensor]:
    """Return h, dX and dW."""
    x = x.clone().requires_grad_()
    h = linear(x)
    return [h.detach(), *torch.autograd.grad(h, (x, linear.weight), dh)]


def references(gemms: Gemms, *numbers: torch.Tensor, **place: Any) -> dict[str, Any]:
    dtype = str(numbers[0].dtype).removeprefix("torch.")
    settings = {"seed": SEED, "name": NAME, "step": STEP, "first_row": FIRST_ROW, "dtype": dtype} | place
    reference = Reference(gemms.filled(BlockCast()), **settings)
    x, w, dh = (t.float().numpy() for t in numbers)
    return {"H": reference.forward(x, w), "dX": reference.dgrad(dh, w, x), "dW": reference.wgrad(dh, x, w)}


def assert_linear(gemms: Gemms, dtype: torch.dtype = torch.float32) -> None:
    x, weight, dh = numbers(dtype=dtype)
    found = results(linear_of(gemms, weight), x, dh)
    for got, (what, want) in zip(found, references(gemms, x, weight, dh).items(), strict=True):
        assert_within(got, want, what)
        assert np.abs(want.exact).mean() > 5 * want.slack.mean(), "nothing is asked"


@pytest.mark.integration
@every_recipe
def test_published_recipes_and_mixtures_of_their_parts(name: str) -> None:
    assert_linear(RECIPES[name])


@pytest.mark.integration
@each("name", ["NVIDIA", "Tseng", "FP32 scales beside others", "a scale a row"])
def test_of_bf16_numbers(name: str) -> None:
    assert_linear(RECIPES[name], torch.bfloat16)


TRANSFORM_CASES = [
    *(
        Hadamard(size=16, signs=signs, signs_after=after)
        for signs in ("seed", "step", "call")
        for after in (False, True)
    ),
    *(Hadamard(size=size) for size in (16, 32)),
    Hadamard(size=16, vector=TE_VECTOR),
    Hadamard(size=16, vector=TE_VECTOR, signs_after=True),
]


@pytest.mark.slow
@each("gemm", TRANSFORMS)
@each("transform", TRANSFORM_CASES, ids=str)
def test_transforms_of_each_gemm(gemm: str, transform: Hadamard) -> None:
    """One operand is cast and the other is not. Both are rotated."""
    one = {"forward_transform": "forward_w", "dgrad_transform": "dgrad_w", "wgrad_transform": "wgrad_x"}[gemm]
    assert_linear(everywhere(E2M1, **{gemm: transform, one: None}))


@each("size", [16, 32])
@each("signs", ["none", "seed", "call"])
def test_it_cancels_where_nothing_is_quantised(size: int, signs: str) -> None:
    """Each operand is rounded to bf16 once, by at most 2^-8 of a tile's length, so the product by twice that."""
    x, weight, dh = numbers()
    transform = Hadamard(size=size, signs=signs)
    gemms = Gemms(**dict.fromkeys(TRANSFORMS, transform))
    pairs = ((x, weight.T), (dh, weight), (dh.T, x))
    for got, (a, b) in zip(results(linear_of(gemms, weight), x, dh), pairs, strict=True):
        lengths = a.unflatten(-1, (-1, size)).norm(dim=-1).double() @ b.unflatten(0, (-1, size)).norm(dim=1).double()
        differs = (got.double() - a.double() @ b.double()).abs()
        assert (differs <= 2.01 * 2.0**-8 * lengths).all()
        assert differs.max() > 0


def test_signs_after_it_change_nothing_under_rounding_to_nearest() -> None:
    x, weight, dh = numbers()
    found = [
        results(linear_of(everywhere(E2M1, **dict.fromkeys(TRANSFORMS, transform)), weight), x, dh)
        for transform in (Hadamard(size=32), Hadamard(size=32, signs="call", signs_after=True))
    ]
    for plain, signed in zip(*found, strict=True):
        assert_same_bits(plain, signed)


@each(
    ("signs", "steps", "rows"),
    [("seed", False, False), ("step", True, False), ("call", True, True), ("none", False, False)],
)
def test_when_signs_are_drawn_anew(signs: str, steps: bool, rows: bool) -> None:
    x, weight, _ = numbers()
    linear = linear_of(everywhere(E2M1, forward_transform=Hadamard(size=32, signs=signs)), weight)
    here = linear(x)
    move_to(linear, STEP + 1, FIRST_ROW)
    next_step = linear(x)
    move_to(linear, STEP, FIRST_ROW + TOKENS)
    assert torch.equal(here, next_step) != steps
    assert torch.equal(here, linear(x)) != rows
    move_to(linear, STEP, FIRST_ROW)
    assert torch.equal(here, linear(x))


def test_what_an_operand_draws_is_its_own() -> None:
    """Rows of a weight draw the same whatever the tokens. Seed, module and step change all draws."""
    x, weight, dh = numbers()
    only_weights = everywhere(E2M1, forward_w=SR, dgrad_w=SR)
    here = results(linear_of(only_weights, weight), x, dh)
    moved = linear_of(only_weights, weight)
    move_to(moved, STEP, 0)
    for one, other in zip(here[:2], results(moved, x, dh), strict=False):
        assert torch.equal(one, other)
    for other in (linear_of(only_weights, weight, (SEED + 1,)), linear_of(only_weights, weight, name="other")):
        assert not torch.equal(here[0], results(other, x, dh)[0])


# --------------------------------------------------------------------------------------------------------- rows, bounds


def test_a_row_with_a_scale_of_its_own_is_that_row_alone() -> None:
    x, weight, _ = numbers()
    linear = linear_of(Gemms(forward_x=replace(NVFP4, outer_scale="row"), forward_w=NVFP4), weight)
    together = linear(x)
    for i in range(0, TOKENS, 7):
        torch.testing.assert_close(together[i : i + 1], linear(x[i : i + 1]), rtol=1e-6, atol=1e-5)
    x[3] = torch.nan
    assert torch.equal(linear(x).isnan().any(-1), torch.arange(TOKENS) == 3)


@pytest.mark.integration
@each("source", ["forward", "high_precision"])
@each("bound", [1.0, 40.0])
@each("transform", [None, Hadamard(size=32, signs="seed")])
def test_what_the_backward_takes_is_what_the_forward_has_cast_under_its_bound(
    bound: float, transform: Hadamard | None, source: str
) -> None:
    """The backward takes what the forward has cast under its bound, and so does a cast of wgrad's own transform.

    A bound of 1 is exceeded, so that many numbers are clipped, and masked.
    """
    _, weight, dh = numbers()
    x = torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(1))
    bounded = replace(NVFP4, outer_scale="bound", mask_clipped=True)
    wgrad_x = replace(NVFP4, outer_scale="bound", source=source)
    rotated = {"forward_transform": transform, "wgrad_transform": Hadamard(size=16)}
    gemms = everywhere(NVFP4, forward_x=bounded, wgrad_x=wgrad_x, **rotated)
    linear = Linear(gemms.filled(BlockCast()), linear_of(gemms, weight).random)
    reference = Reference(linear.gemms, SEED, NAME, STEP, FIRST_ROW, bound=bound)
    given = Bounds(torch.tensor(bound * (transform.size**0.5 if transform else 1.0)), torch.tensor(bound))
    X, W, dH = x.numpy(), weight.numpy(), dh.numpy()
    assert_within(forward_gemm(x, weight, linear, torch.float32, given), reference.forward(X, W), "H")
    assert_within(dgrad_gemm(dh, weight, linear, x, weight, given), reference.dgrad(dH, W, X), "dX")
    assert_within(wgrad_gemm(dh, x, linear, weight, given), reference.wgrad(dH, X, W), "dW")


def test_masks_hold_back_what_was_clipped() -> None:
    """Without a transform, the gradient is zero exactly where numbers were clipped.

    With one, its coordinates under the transform are zero there, but for the roundings on the way back.
    """
    x, weight, dh = numbers()
    plain = RECIPES["masks without a transform"]
    reference = Reference(plain.filled(BlockCast()), SEED, NAME, STEP, FIRST_ROW)
    _, dx, dw = results(linear_of(plain, weight), x, dh)
    for gradient, operand, of in ((dx, "forward_x", x), (dw, "forward_w", weight)):
        inside = torch.tensor(reference.quantized(of.numpy(), operand, 1).inside)
        assert 0 < (~inside).sum() < inside.numel() / 4
        assert torch.equal(gradient != 0, inside)


# --------------------------------------------------------------------------------------------------------------- stacks


@pytest.mark.integration
@every_recipe
def test_a_replica_of_a_stack_is_a_linear_alone(name: str) -> None:
    """The stack also has a replica with a NaN. GEMMs of a stack sum in an order of their own."""
    gemms, seeds = RECIPES[name], (3, 4, 5)
    x, weight, dh = (torch.stack(parts) for parts in zip(*(numbers(seed) for seed in seeds), strict=True))
    x[1, 7, 9] = dh[1, 3, 3] = weight[1, 2, 2] = torch.nan
    alone = [linear_of(gemms, weight[i], (seed,)) for i, seed in enumerate(seeds)]
    stack = linear_of(gemms, weight, seeds)
    leaves = [t.requires_grad_() for t in (x, weight)]
    h = mx_linear(*leaves, stack.arithmetic)
    found = [h.detach(), *torch.autograd.grad(h, leaves, dh)]
    for i in (0, 2):
        for got, want in zip(found, results(alone[i], x[i].detach(), dh[i]), strict=True):
            torch.testing.assert_close(got[i], want, rtol=2.0**-7, atol=float(want.abs().max()) * 2.0**-9)
    assert found[0][1].isnan().any()


# ------------------------------------------------------------------------------------------------------------- refusals


@each(
    ("settings", "message"),
    [
        ({"scale": "FP32", "outer_scale": "tensor"}, "outer_scale: FP32 scales cover the range of FP32"),
        ({"scale": "E4M3", "outer_scale": "row", "two_dimensional": True}, "outer_scale: a square block spans several"),
        ({"scale": "E4M3", "outer_scale": "bound", "two_dimensional": True}, "use tensor"),
    ],
)
def test_scales_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cast(format="E2M1", **settings)


def test_the_recipes_have_every_field() -> None:
    casts = [cast for gemms in RECIPES.values() for _, cast in gemms.casts()]
    for field in fields(Cast):
        if field.name != "candidate_error":  # tested for casts alone
            assert any(getattr(cast, field.name) != field.default for cast in casts), field.name
    transforms = [t for gemms in RECIPES.values() for name in TRANSFORMS if (t := getattr(gemms, name))]
    for field in fields(Hadamard):
        assert len({getattr(transform, field.name) for transform in transforms + TRANSFORM_CASES}) > 1, field.name
    assert math.isclose(sum(TE_VECTOR), -4)
