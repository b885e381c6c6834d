"""Stochastic rounding in operands is unbiased where nothing saturates, and independent from copy to copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from each import each
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mxstudy.config.casts import BlockCast, Cast, Gemms, Hadamard
from mxstudy.model.linear import MXLinear
from mxstudy.model.random_streams import give_streams, move_to
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.gemms import wgrad_gemm
from mxstudy.numerics.random_bits import Draws, stream_key

MX = Cast(format="E2M1", rounding="stochastic", scale_rule="floor").filled(BlockCast())
NVFP4 = Cast(format="E2M1", rounding="stochastic", block_size=16, scale="E4M3", outer_scale="tensor").filled(
    BlockCast()
)
NVFP4_FITS = replace(NVFP4, headroom=16 / 17)
UNBIASED = {
    "floor, 3/4": replace(MX, headroom=0.75),
    "ceil": replace(MX, scale_rule="ceil"),
    "rceil": replace(MX, scale_rule="rceil"),
    "NVFP4, 16/17": NVFP4_FITS,
    "FP32 scales": replace(MX, scale="FP32", scale_rule=None),
    "squares": replace(NVFP4_FITS, two_dimensional=True),
    "E4M3": replace(MX, format="E4M3", scale_rule="rceil"),
}
BIASED = {  # {name: (cast, least bias, largest bias)}
    "floor": (MX, -0.02, -0.01),  # 2.5 % of numbers saturate
    "NVFP4": (NVFP4, -0.0045, -0.0025),  # blocks whose scale is rounded down saturate
    "NVFP4, 16/17, 8 bits": (replace(NVFP4_FITS, random_bits=8), -0.0008, -0.0004),  # fractions lose 1/512
}
TOKENS, IN, OUT = 64, 128, 256
SR = Cast(format="E2M1", rounding="stochastic")


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mean_of_draws(x: Tensor, cast: Cast, draws: int, at_once: int = 32) -> Tensor:
    """Return the mean of so many casts, at one step after another, float64."""
    key, total = torch.tensor(stream_key(0, "mean")).expand(at_once, 2), torch.zeros(x.shape, dtype=torch.float64)
    for first in range(0, draws, at_once):
        places = torch.stack([torch.arange(first, first + at_once), torch.zeros(at_once, dtype=torch.int64)], 1)
        outer = (
            None
            if cast.outer_scale == "none"
            else quantize_as(x, replace(cast, rounding="even", random_bits=24), -1).tensor_scale
        )
        total += (
            quantize_as(x.expand(at_once, *x.shape), cast, -1, outer, Draws(key, places)).dequantize().double().sum(0)
        )
    return total / draws


def slope(mean: Tensor, x: Tensor) -> float:
    """Return the slope of the regression of the mean on x, through the origin."""
    return float((mean * x.double()).sum() / x.double().square().sum())


def below_and_above(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor]:
    """Return the magnitude at or below each x that decodes from E2M1, and the distance to the next one, float64."""
    even = quantize_as(x, replace(cast, rounding="even", random_bits=24), -1)
    scale = even.scale_values.repeat_interleave(even.block_size, -1)
    if cast.two_dimensional:
        scale = scale.repeat_interleave(even.block_size, -2)
    z = (x / scale).double().abs()
    step = torch.where(z < 2, 0.5, torch.where(z < 4, 1.0, 2.0))
    low = (z / step).floor() * step
    return low * scale, step * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_is_the_number_where_nothing_saturates(name: str) -> None:
    """With 4096 draws of 9216 numbers the slope is known to 3e-5, and each mean to its own standard error."""
    x, cast = gaussian(96, 96), UNBIASED[name]
    mean = mean_of_draws(x, cast, 4096)
    assert abs(slope(mean, x) - 1) < 1e-4
    if cast.format != "E2M1":
        return
    low, step = below_and_above(x, cast)
    f = ((x.double().abs() - low) / step).clamp(0, 1)
    seen = (f > 0.02) & (f < 0.98)
    errors = (mean - x).abs() / (step * (f * (1 - f) / 4096).sqrt())
    assert seen.float().mean() > 0.9
    assert errors[seen].max() < 5
    assert abs(errors[seen].square().mean() - 1) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASED)
def test_and_is_not_where_something_does(name: str) -> None:
    """The test above fails for rule floor, published NVFP4, and eight random bits."""
    x, (cast, least, most) = gaussian(96, 96), BIASED[name]
    assert least < slope(mean_of_draws(x, cast, 4096), x) - 1 < most


@pytest.mark.slow
def test_also_in_blocks_whose_scale_was_rounded_down() -> None:
    x = gaussian(96, 96)
    got = quantize_as(x, replace(NVFP4, rounding="even"), -1)
    fits = x.abs().unflatten(-1, (-1, 16)).amax(-1) / 6
    down = (got.scale_values < fits).repeat_interleave(16, -1)
    assert 0.3 < down.float().mean() < 0.7
    with_room, without = (mean_of_draws(x, cast, 4096)[down] for cast in (NVFP4_FITS, NVFP4))
    assert abs(slope(with_room, x[down]) - 1) < 1.5e-4
    assert slope(without, x[down]) < 1 - 4e-3


@pytest.mark.parametrize("name", ["floor, 3/4", "NVFP4, 16/17"])
def test_a_few_draws_show_a_large_bias(name: str) -> None:
    """128 casts give the slope to 1.5e-4. The limit is five times that, and the floor rule is far outside."""
    x = gaussian(96, 96)
    assert abs(slope(mean_of_draws(x, UNBIASED[name], 128), x) - 1) < 8e-4
    assert abs(slope(mean_of_draws(x, MX, 128), x) - 1) > 8e-4


# --------------------------------------------------------------------------------------------------------- in a linear

GEMMS = Gemms(
    forward_x=SR,
    forward_w=SR,
    dgrad_dh=SR,
    dgrad_w=SR,
    wgrad_dh=SR,
    wgrad_x=SR,
    wgrad_transform=Hadamard(size=32, signs="call"),
)


def linear_of(gemms: Gemms = GEMMS, name: str = "up", seeds: tuple[int, ...] = (0,), step: int = 3) -> MXLinear:
    linear = MXLinear(IN, OUT, 1.0)
    replicas = (len(seeds),) if len(seeds) > 1 else ()
    linear.weight = torch.nn.Parameter(gaussian(*replicas, OUT, IN, seed=1) / IN**0.5)
    linear.gemms = gemms.filled(BlockCast())
    give_streams(linear, {name: linear}, seeds)
    move_to(linear, step, 0)
    return linear


def errors(linear: MXLinear, operand: str, x: Tensor, axis: int = -1) -> Tensor:
    """Return the errors of x as that operand, one number per element."""
    read = linear.arithmetic.operand(x, operand, axis, torch.float32).values
    return (read - linear.arithmetic.rotated(x, operand.partition("_")[0], axis)).flatten().double()


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


def test_copies_layers_steps_seeds_and_micro_batches_are_not_correlated() -> None:
    dh = gaussian(TOKENS, OUT)
    plain = replace(GEMMS, wgrad_transform=None)
    here = errors(linear_of(plain), "dgrad_dh", dh)
    moved = linear_of(plain)
    move_to(moved, 3, TOKENS)
    others = {
        "itself": (here, True),
        "the copy for wgrad": (errors(linear_of(plain), "wgrad_dh", dh, -2), False),
        "another layer": (errors(linear_of(plain, "down"), "dgrad_dh", dh), False),
        "the next step": (errors(linear_of(plain, step=4), "dgrad_dh", dh), False),
        "another seed": (errors(linear_of(plain, seeds=(1,)), "dgrad_dh", dh), False),
        "the next micro-batch": (errors(moved, "dgrad_dh", dh), False),
        "the rows in another order": (
            errors(linear_of(plain), "dgrad_dh", dh.flip(0)).unflatten(0, dh.shape).flip(0).flatten(),
            False,
        ),
    }
    for what, (other, is_same) in others.items():
        found = correlation(here, other)
        assert found == pytest.approx(1) if is_same else abs(found) < 5 / dh.numel() ** 0.5, what


def test_replicas_of_a_stack_draw_apart() -> None:
    dh = gaussian(TOKENS, OUT)
    linear = linear_of(replace(GEMMS, wgrad_transform=None), seeds=(0, 1))
    move_to(linear, torch.tensor([3, 9]), 0)
    read = linear.arithmetic.operand(dh.expand(2, -1, -1), "dgrad_dh", -1, torch.float32).values - dh
    assert abs(correlation(*read.flatten(1).double())) < 5 / dh.numel() ** 0.5
    assert torch.equal(read[1].flatten().double(), errors(linear_of(GEMMS, seeds=(1,), step=9), "dgrad_dh", dh))


def test_recomputation_repeats_its_draws() -> None:
    """A forward that runs again for the backward, between others, gives the same gradients as one that does not."""
    first, second = linear_of(), linear_of(name="second")
    second.weight = torch.nn.Parameter(gaussian(IN, OUT, seed=2) / OUT**0.5)
    x = gaussian(TOKENS, IN)

    def block(x: Tensor) -> Tensor:
        return second(torch.relu(first(x)))

    found = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        h = run(run(leaf))
        found.append([h, *torch.autograd.grad(h.square().sum(), (leaf, first.weight, second.weight))])
    for once, again in zip(*found, strict=True):
        assert torch.equal(once, again)


@each("operand", ["forward_x", "dgrad_dh", "wgrad_dh", "wgrad_x"])
def test_two_micro_batches_draw_what_one_does(operand: str) -> None:
    """The rows of the second are offset by its place, and blocks along the tokens end with a micro-batch."""
    axis = -2 if operand.startswith("wgrad") else -1
    x = gaussian(TOKENS, OUT)
    linear = linear_of(replace(GEMMS, wgrad_transform=Hadamard(size=32, signs="step")))
    parts = []
    for first in (0, TOKENS // 2):
        move_to(linear, 3, first)
        part = x[first : first + TOKENS // 2]
        parts.append(linear.arithmetic.operand(part, operand, axis, torch.float32).values)
    move_to(linear, 3, 0)
    assert torch.equal(torch.cat(parts), linear.arithmetic.operand(x, operand, axis, torch.float32).values)


@pytest.mark.slow
@pytest.mark.parametrize("transform", [None, Hadamard(size=32, signs="call")])
def test_the_mean_of_dw_is_dw(transform: Hadamard | None) -> None:
    """The mean over 128 steps is within each element's standard error. With rule floor it is not."""
    x, dh, steps = gaussian(TOKENS, IN).bfloat16().float(), gaussian(TOKENS, OUT, seed=3).bfloat16().float(), 128
    exact = dh.double().T @ x.double()

    def scores(cast: Cast) -> Tensor:
        """Return how many standard errors each element's mean is off."""
        linear = linear_of(Gemms(wgrad_dh=cast, wgrad_x=replace(cast), wgrad_transform=transform))
        found = []
        for step in range(steps):
            move_to(linear, step, 0)
            found.append(wgrad_gemm(dh, x, linear.arithmetic).double())
        all_of_them = torch.stack(found)
        return (all_of_them.mean(0) - exact) / (all_of_them.std(0) / steps**0.5)

    unbiased = scores(replace(SR, headroom=0.75, scale_rule="floor"))
    assert unbiased.abs().max() < 7  # the largest of 32768 elements, with the standard errors of 128 steps
    assert unbiased.square().mean() == pytest.approx(1, abs=0.05)
    if transform is None:
        shrunk = (scores(replace(SR, scale_rule="floor")) * exact.sign()).mean()
        assert shrunk < -10 * abs((unbiased * exact.sign()).mean())
