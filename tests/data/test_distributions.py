"""Random tensors have the moments and tails that their names say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from each import each

from mxstudy.data.distributions import DISTRIBUTIONS, with_outliers
from mxstudy.numerics import quantize
from mxstudy.numerics.quality import overflow_fraction

SHAPE = (1024, 512)
GELU_MEAN = 1 / (2 * math.sqrt(math.pi))  # E[x Phi(x)] of a Gaussian x is E[phi(x)]


def draw(name: str, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return DISTRIBUTIONS[name](shape, torch.Generator().manual_seed(seed))


@each("name", DISTRIBUTIONS)
def test_a_seed_gives_one_float32_tensor(name: str) -> None:
    x = draw(name, shape=(3, 5, 7))
    assert (x.shape, x.dtype) == ((3, 5, 7), torch.float32)
    assert torch.equal(x, draw(name, shape=(3, 5, 7)))
    assert not torch.equal(x, draw(name, seed=1, shape=(3, 5, 7)))


@each("name", DISTRIBUTIONS)
def test_a_generator_goes_on_from_where_it_was(name: str) -> None:
    """Otherwise every draw of a measurement would be the same."""
    generator = torch.Generator().manual_seed(0)
    first, second = (DISTRIBUTIONS[name]((4, 8), generator) for _ in range(2))
    assert not torch.equal(first, second)


@each(
    ("name", "mean", "std", "fourth"),
    [
        ("gaussian", 0.0, 1.0, 3.0),
        ("uniform", 0.0, 1.0, 9 / 5),
        ("laplace", 0.0, 1.0, 6.0),
        ("log_normal", math.exp(0.02**2 / 2), 0.02, 3.0),
        ("gain 1.02 +- 0.003", 1.02, 0.003, 3.0),
        ("gain 0.99 +- 0.003", 0.99, 0.003, 3.0),
        ("gain 0.95 +- 0.02", 0.95, 0.02, 3.0),
    ],
)
def test_mean_spread_and_tails(name: str, mean: float, std: float, fourth: float) -> None:
    """Half a million numbers have these moments. `fourth` is the fourth central moment divided by std^4."""
    x = draw(name).double()
    centred = x - x.mean()
    assert x.mean().item() == pytest.approx(mean, abs=6 * std / math.sqrt(x.numel()))
    assert centred.std().item() == pytest.approx(std, rel=0.01)
    assert ((centred / centred.std()) ** 4).mean().item() == pytest.approx(fourth, rel=0.05)


def test_gelu_is_that_of_a_gaussian() -> None:
    x = draw("gelu").double()
    assert x.mean().item() == pytest.approx(GELU_MEAN, abs=6 * x.std().item() / math.sqrt(x.numel()))
    assert x.min().item() == pytest.approx(-0.16997, abs=1e-4)  # where GELU has its minimum
    assert (x < 0).double().mean().item() == pytest.approx(0.5, abs=0.005)


@pytest.mark.parametrize("features", [1, 4])
def test_outliers_are_the_same_features_of_every_row(features: int) -> None:
    x = draw("gaussian", shape=(8, 256))
    before = x.clone()
    ratio = (with_outliers(x, 100.0, features) / x).round(decimals=3)
    assert torch.equal(x, before)
    assert (ratio == ratio[0]).all()
    places = torch.nonzero(ratio[0] == 100).flatten()
    assert len(places) == features
    assert (ratio[0] == 1).sum() == 256 - features
    assert len(set((places // 32).tolist())) == features  # each in a block of its own


@each(
    ("name", "scale", "percent", "off_by"),
    [
        ("gaussian", 1.0, 0.86, 0.03),
        ("uniform", 1 / math.sqrt(3), 12.5, 0.1),  # in -1..1: with a variance of 1 its maximum is 1.73, below 1.75
        ("laplace", math.sqrt(2), 0.77, 0.03),  # its density is exp(-|x|) / 2
        ("gelu", 1.0, 0.8, 0.12),
        ("gain 1.02 +- 0.003", 1.0, 0.0, 0.0),
        ("gain 0.99 +- 0.003", 1.0, 98.6, 0.3),
        ("gain 0.95 +- 0.02", 1.0, 82.0, 1.5),
    ],
)
def test_the_last_bin_of_the_ocp_rule(name: str, scale: float, percent: float, off_by: float) -> None:
    """The percentage of elements above 448 scales, E4M3 under `floor`, is what public code counts for blocks of 32.

    It depends on where a block's maximum lies in its binade. So it depends on the scale, and repeats with factors of 2.
    """
    x = scale * draw(name)
    assert 100 * overflow_fraction(quantize(x, "E4M3", scale_rule="floor"), x).item() == pytest.approx(
        percent, abs=off_by
    )


def test_the_last_bin_of_gains_follows_from_the_block_maximum() -> None:
    """Gains between 0.875 and 1 all overflow, unless one gain of their block is at least 1: then none does."""
    x = draw("gain 0.95 +- 0.02")
    blocks = x.numpy().reshape(-1, 32)
    overflowing = (blocks > 0.875) & (blocks.max(-1, keepdims=True) < 1)
    got = overflow_fraction(quantize(x, "E4M3", scale_rule="floor"), x).item()
    assert got == pytest.approx(np.mean(overflowing), abs=1e-12)
