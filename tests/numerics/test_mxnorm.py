"""The RMS and its estimate from block absmax follow the MXNorm paper, sections 3.3 to 3.6 and appendix F."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from each import each
from reference import dequantize_array, quantize_array
from reference_mxnorm import block_absmax, rms_coefficient_by_density, rms_estimate_array

from mxstudy import config
from mxstudy.model import MXNorm, rms_coefficient
from mxstudy.numerics import fake_quantize, quantize
from mxstudy.numerics.norm_linear import rms_estimate, rms_exact
from mxstudy.reader import ConfigError

EPS = 1e-5
PAPER = {(16, 1): 0.4814, (16, 2): 0.4688, (32, 1): 0.4261, (32, 2): 0.4185, (64, 1): 0.3852, (64, 2): 0.3803}
BLOCK_SIZES = (16, 32, 64)
POWERS = (0.5, 1.0, 2.0, 4.0)
every_block_size = each("block_size", BLOCK_SIZES)
every_p = each("p", POWERS)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------------- the coefficient


@each(("block_size", "p"), PAPER)
def test_the_six_values_of_the_paper(block_size: int, p: int) -> None:
    assert round(rms_coefficient(p, block_size), 4) == PAPER[block_size, p]


@every_block_size
@each("p", [0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 16.0])
def test_coefficient_by_another_integral(p: float, block_size: int) -> None:
    assert rms_coefficient(p, block_size) == pytest.approx(rms_coefficient_by_density(p, block_size), rel=1e-7)


@every_block_size
@every_p
def test_coefficient_by_monte_carlo(p: float, block_size: int) -> None:
    """coef^-p is the p-th moment of the absmax (Eq. 6), within four standard errors of its sample mean."""
    draws = gaussian(2_000_000 // block_size, block_size, seed=1).abs().amax(-1).double() ** p
    standard_error = draws.std() / math.sqrt(len(draws))
    assert standard_error < 0.005 * draws.mean()
    assert abs(rms_coefficient(p, block_size) ** -p - draws.mean()) < 4 * standard_error


@every_block_size
def test_coefficient_falls_with_p_and_with_the_block(block_size: int) -> None:
    """Power means grow with p, and a maximum with the number of draws. The coefficient is their reciprocal."""
    values = [rms_coefficient(p, block_size) for p in POWERS]
    assert 0 < values[-1] < values[0] < 1
    assert values == sorted(values, reverse=True)
    for p in POWERS:
        assert rms_coefficient(p, 2 * block_size) < rms_coefficient(p, block_size)


# ------------------------------------------------------------------------------------------------- RMS and estimate


@pytest.mark.integration
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 256), (2, 3, 128), (64,)])
def test_against_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (gaussian(*shape) * 2.0 ** gaussian(*shape[:-1], 1, seed=1)).to(dtype)
    exact = x.double().numpy()
    rms = rms_exact(x, EPS)
    assert rms.dtype == torch.float32
    assert rms.shape == (*shape[:-1], 1)
    np.testing.assert_allclose(rms, np.sqrt((exact**2).mean(-1, keepdims=True) + EPS), rtol=1e-6)
    for block_size in BLOCK_SIZES:
        for p in (*POWERS, 1.7):
            rms = rms_estimate(x, p, block_size, EPS)
            assert rms.dtype == torch.float32
            assert rms.shape == (*shape[:-1], 1)
            np.testing.assert_allclose(rms, rms_estimate_array(exact, p, block_size, EPS), rtol=1e-6)


@pytest.mark.parametrize("block_size", [0, -32])
def test_blocks_without_numbers_are_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size: {block_size} is not a block size"):
        rms_coefficient(2, block_size)
    with pytest.raises(ConfigError, match=f"64 does not divide into blocks of {block_size}"):
        MXNorm(64, 2, block_size)


@pytest.mark.parametrize("p", [0, -1.0, math.inf, math.nan])
def test_an_exponent_without_a_mean_is_refused_everywhere_in_the_same_words(p: float) -> None:
    for refused in (
        lambda: rms_coefficient(p, 32),
        lambda: rms_estimate(torch.ones(1, 32), p, 32, EPS),
        lambda: MXNorm(256, p),
        lambda: config.MXNorm(p=p),
    ):
        with pytest.raises(ConfigError, match=f"^p: the exponent of the p-mean must be positive and finite, not {p}$"):
            refused()


def test_eps_is_added_to_the_mean_square_or_to_the_estimate() -> None:
    x = gaussian(4, 64)
    np.testing.assert_allclose(rms_exact(x, 3.0) ** 2, rms_exact(x, 0.0) ** 2 + 3.0, rtol=1e-6)
    np.testing.assert_allclose(rms_estimate(x, 2.0, 32, 3.0), rms_estimate(x, 2.0, 32, 0.0) + 3.0, rtol=1e-6)
    zero = torch.zeros(2, 64)
    np.testing.assert_allclose(rms_exact(zero, EPS), np.full((2, 1), math.sqrt(EPS)), rtol=1e-6)
    for p in POWERS:
        np.testing.assert_allclose(rms_estimate(zero, p, 32, EPS), np.full((2, 1), EPS), rtol=1e-6)


@every_p
@every_block_size
@each("dtype", [torch.float32, torch.bfloat16])
def test_estimate_is_homogeneous(p: float, block_size: int, dtype: torch.dtype) -> None:
    x = gaussian(16, 128).to(dtype)
    one = rms_estimate(x, p, block_size, 0.0)
    for shift in (-90, -1, 5, 100):
        assert torch.equal(rms_estimate(x * 2.0**shift, p, block_size, 0.0), one * 2.0**shift)
    np.testing.assert_allclose(rms_estimate(-3 * x.float(), p, block_size, 0.0), 3 * one, rtol=1e-6)


@each("p", [0.05, 0.5, 1.0, 2.0, 8.0, 50.0])
def test_no_p_over_or_underflows(p: float) -> None:
    x = gaussian(8, 128)
    shift = torch.tensor([-125, -100, -60, -30, 0, 30, 100, 124])[:, None]
    got = rms_estimate(torch.ldexp(x, shift), p, 32, 0.0).double()
    want = rms_estimate_array(x.double().numpy(), p, 32, 0.0)
    np.testing.assert_allclose(torch.ldexp(got, -shift), want, rtol=1e-6)


def test_estimate_reads_only_block_absmax() -> None:
    """Other elements, the order within a block, the order of blocks, and signs do not matter."""
    x = gaussian(8, 4, 32)
    want = rms_estimate(x.reshape(8, 128), 2.0, 32, EPS)
    largest = x.abs() == x.abs().amax(-1, keepdim=True)
    for same in (torch.where(largest, x, x * 0.1), torch.where(largest, -x, x), x.flip(-1)):
        assert torch.equal(rms_estimate(same.reshape(8, 128), 2.0, 32, EPS), want)
    np.testing.assert_allclose(rms_estimate(x.flip(1).reshape(8, 128), 2.0, 32, EPS), want, rtol=1e-6)
    assert not torch.equal(rms_estimate(x.transpose(1, 2).reshape(8, 128), 2.0, 32, EPS), want)


@each("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_row_stays_non_finite_and_alone(bad: float) -> None:
    x = gaussian(4, 128)
    clean = rms_estimate(x, 2.0, 32, EPS)
    x[1, 70] = bad
    got = rms_estimate(x, 2.0, 32, EPS)
    assert not got[1].isfinite()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])
    assert fake_quantize(x / got, "E4M3")[1, 64:96].isnan().all()


@every_p
@every_block_size
def test_estimate_converges_to_the_rms_of_a_gaussian(p: float, block_size: int) -> None:
    """In one row of 2^20, the estimate is within five standard errors of the RMS (Theorem 1).

    Its relative error is that of its p-mean.
    """
    x = gaussian(1, 2**20, seed=2) * 7.0
    maxima = torch.as_tensor(block_absmax(x.double().numpy(), block_size)) ** p
    relative = maxima.std() / maxima.mean() / math.sqrt(maxima.numel()) / p
    assert relative < 0.005
    assert abs(rms_estimate(x, p, block_size, 0.0).item() / 7.0 - 1) < 5 * relative


# ------------------------------------------------------------------------------------------------- bounds (Lemma 2)


@pytest.mark.parametrize(("p", "bound"), [(1.0, 132.95), (2.0, 17.06)])
def test_the_papers_two_bounds(p: float, bound: float) -> None:
    """The row has K = 64 blocks of 16, and the coefficients are as printed, with four digits."""
    assert round(64 ** (1 / p) / round(rms_coefficient(p, 16), 4), 2) == bound


@every_p
@every_block_size
def test_bound_is_reached_by_a_lone_spike(p: float, block_size: int) -> None:
    """For any other elements x / rms stays below K^(1/p) / coef, and with zeros it is equal."""
    size = 1024
    bound = (size // block_size) ** (1 / p) / rms_coefficient(p, block_size)
    spike = torch.zeros(3, size)
    spike[0, 0], spike[1, 517], spike[2, 1023] = 1.0, -1e20, 1e-20
    lone = (spike / rms_estimate(spike, p, block_size, 0.0)).abs().amax(-1)
    np.testing.assert_allclose(lone, np.full(3, bound), rtol=2e-6)
    worst = [spike + gaussian(3, size) * 1e-3, spike.clamp_min(1e-7), gaussian(64, size), gaussian(64, size) ** 9]
    worst += [torch.eye(size)[::37] * 3, torch.linspace(-1, 1, size)[None] ** 31, torch.ones(1, size)]
    for x in worst:
        normed = x / rms_estimate(x, p, block_size, EPS)
        assert normed.abs().max() <= bound * (1 + 2e-6)
        for fmt, half_step in (("E4M3", 2.0**-4), ("E5M2", 2.0**-3)):
            assert fake_quantize(normed, fmt, block_size).abs().max() <= bound * (1 + half_step)


# ---------------------------------------------------------------------------------- MXNorm against RMSNorm and a cast


@each(("size", "at_least"), [(1024, 0.9975), (4096, 0.9985)])
@each("std", [0.5, 1.0, 50.0])  # at a much smaller std RMSNorm's eps, which is added to the mean square, would show
@each("dtype", [torch.float32, torch.bfloat16])
def test_approximation_of_rmsnorm_and_cast(size: int, at_least: float, std: float, dtype: torch.dtype) -> None:
    """r^2 = 1 - SSE / SST of the decoded tensors, on Gaussian rows (section 3.6)."""
    x = (gaussian(256, size, seed=3) * std).to(dtype)
    want = fake_quantize(x.float() / rms_exact(x, EPS), "E4M3").double()
    got = fake_quantize(x.float() / rms_estimate(x, 2.0, 32, EPS), "E4M3").double()
    r2 = 1 - (got - want).square().sum() / (want - want.mean()).square().sum()
    assert at_least <= r2 < 1


@every_p
@every_block_size
def test_scales_follow_from_the_maxima_alone(p: float, block_size: int) -> None:
    """S = scale(m / rms) and V = cast((x / rms) / S), so the maxima that gave the estimate also give S (Eq. 9, 10)."""
    x = gaussian(32, 256) * 3
    rms = rms_estimate(x, p, block_size, EPS)
    got = quantize(x / rms, "E4M3", block_size)
    maxima = x.unflatten(-1, (-1, block_size)).abs().amax(-1) / rms
    alone = quantize(maxima.unsqueeze(-1).expand(-1, -1, block_size).flatten(1), "E4M3", block_size)
    assert torch.equal(got.scales, alone.scales)
    values, scales = quantize_array((x / rms).double().numpy(), "E4M3", block_size)
    assert (got.scales.numpy() == scales).all()
    assert (got.dequantize().numpy() == dequantize_array(values, scales)).all()
