"""The RMS from rounded scales follows the MXNorm paper's appendix K: mean of the scales, its inverse, estimate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from each import each
from reference import ELEMENTS, SCALE_RULES, scale_exponents

from mxstudy.model import PostRoundMXNorm
from mxstudy.numerics import FORMATS, BlockCast
from mxstudy.numerics.postround import cutoff, interpolate, inverse_table, mean_rounded_absmax, rms_post_round
from mxstudy.reader import ConfigError

CPU = torch.device("cpu")
CUTOFFS = {"floor": 1.0, "ceil": 0.5, "rceil": 0.875, "even": 0.96875}  # E4M3's cutoffs
every_rule = each("rule", SCALE_RULES)
every_format = each("fmt", ELEMENTS)
every_block_size = each("block_size", [16, 32, 64])


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(absmax: np.ndarray, fmt: str, rule: str) -> np.ndarray:
    """Return r(m), the scale that the reference gives a block of this absmax, times 2^emax."""
    return np.ldexp(1.0, scale_exponents(absmax, ELEMENTS[fmt], rule) + ELEMENTS[fmt].emax)


def estimate(x: torch.Tensor, rule: str, block_size: int = 32, fmt: str = "E4M3", eps: float = 0.0) -> torch.Tensor:
    return rms_post_round(x, fmt, BlockCast(block_size, rule), eps)


# ---------------------------------------------------------------------------------------------- the mean of the scales


@every_rule
def test_cutoffs_of_e4m3(rule: str) -> None:
    assert cutoff(FORMATS["E4M3"], rule) == pytest.approx(CUTOFFS[rule], abs=2.0**-23)


@every_rule
@every_format
def test_a_cutoff_is_where_the_scale_changes(rule: str, fmt: str) -> None:
    limit = cutoff(FORMATS[fmt], rule)
    below, above = np.nextafter(np.float32(limit), [np.float32(0), np.float32(2)]).astype(np.float64)
    assert (rounded(np.array([below, above, 2 * below, 2 * above]), fmt, rule) == [0.5, 1, 1, 2]).all()


@every_rule
@every_block_size
def test_mean_by_monte_carlo(rule: str, block_size: int) -> None:
    std = 1.3
    absmax = (gaussian(2**21 // block_size, block_size) * std).abs().amax(-1).double().numpy()
    draws = rounded(absmax, "E4M3", rule)
    standard_error = draws.std() / math.sqrt(len(draws))
    mean = mean_rounded_absmax(torch.tensor(std), block_size, cutoff(FORMATS["E4M3"], rule))
    assert standard_error < 0.005 * draws.mean()
    assert abs(mean - draws.mean()) < 4 * standard_error


@every_rule
@every_block_size
def test_mean_by_quadrature(rule: str, block_size: int) -> None:
    """The mean integrates r(t) with the density B F^(B-1) f of a block's absmax, on a fine grid."""
    t = (np.arange(400_000) + 0.5) * 2e-5
    cdf = torch.erf(torch.from_numpy(t / math.sqrt(2))).numpy()
    density = block_size * cdf ** (block_size - 1) * math.sqrt(2 / math.pi) * np.exp(-(t**2) / 2)
    want = (rounded(t, "E4M3", rule) * density).sum() * 2e-5
    got = mean_rounded_absmax(torch.tensor(1.0), block_size, cutoff(FORMATS["E4M3"], rule))
    assert got.item() == pytest.approx(want, rel=1e-5)


def test_two_printed_values() -> None:
    """The authors' code prints them, for blocks of 32."""
    for limit, value in ((1.0, 1.7787), (0.875, 1.9605)):
        assert round(mean_rounded_absmax(torch.tensor(1.0), 32, limit).item(), 4) == value


# --------------------------------------------------------------------------------------------------------- its inverse


@pytest.mark.integration
@every_rule
@every_block_size
def test_the_table_inverts_the_mean(rule: str, block_size: int) -> None:
    """Interpolation between 257 entries errs by at most 3e-5, in blocks of 64, where the curve bends most."""
    limit = cutoff(FORMATS["E4M3"], rule)
    means = torch.linspace(1, 2, 3001)[:-1]
    stds = interpolate(means, inverse_table(block_size, limit, CPU))
    assert (stds.diff() > 0).all()
    np.testing.assert_allclose(mean_rounded_absmax(stds, block_size, limit), means, rtol=3e-5)


def test_the_inverse_is_homogeneous_in_powers_of_two() -> None:
    means, table = torch.linspace(1, 2, 777), inverse_table(32, 0.875, CPU)
    for shift in (-60, -1, 1, 30):
        assert torch.equal(interpolate(means * 2.0**shift, table), interpolate(means, table) * 2.0**shift)


# -------------------------------------------------------------------------------------------------------- the estimate


@pytest.mark.integration
@every_rule
@every_format
@each("std", [1e-20, 0.7, 3.3])
def test_estimate_is_right_for_long_gaussian_rows(rule: str, fmt: str, std: float) -> None:
    rms = estimate(gaussian(2, 2**19, seed=1) * std, rule, fmt=fmt)
    assert rms.shape == (2, 1)
    assert rms.dtype == torch.float32
    np.testing.assert_allclose(rms / std, np.ones((2, 1)), rtol=0.015)


def test_another_rules_cutoff_would_be_seen() -> None:
    x = gaussian(1, 2**19, seed=1)
    scales = torch.tensor(rounded(x.reshape(-1, 32).abs().amax(-1).double().numpy(), "E4M3", "rceil")).mean()
    wrong = interpolate(scales.float().reshape(1), inverse_table(32, CUTOFFS["floor"], CPU))
    assert wrong > 1.05


@pytest.mark.integration
@every_rule
@each("dtype", [torch.float32, torch.bfloat16])
def test_estimate_is_homogeneous_in_powers_of_two(rule: str, dtype: torch.dtype) -> None:
    x = gaussian(16, 256).to(dtype)
    for shift in (-90, -1, 5, 100):
        assert torch.equal(estimate(x * 2.0**shift, rule), estimate(x, rule) * 2.0**shift)


def test_eps_is_added_and_zero_rows_have_it_alone() -> None:
    x = gaussian(4, 64)
    np.testing.assert_allclose(estimate(x, "rceil", eps=3.0), estimate(x, "rceil") + 3.0, rtol=1e-6)
    np.testing.assert_allclose(estimate(torch.zeros(2, 64), "rceil", eps=1e-5), np.full((2, 1), 1e-5), rtol=1e-6)


@each("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_row_stays_non_finite_and_alone(bad: float) -> None:
    x = gaussian(4, 128)
    clean = estimate(x, "rceil")
    x[1, 70] = bad
    got = estimate(x, "rceil")
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.integration
@every_rule
@every_block_size
def test_bound_holds_and_is_nearly_reached_by_lone_spikes(rule: str, block_size: int) -> None:
    norm = PostRoundMXNorm(1024, block_size, rule)
    spikes = torch.zeros(512, 1024)
    spikes[torch.arange(512), torch.arange(0, 1024, 2)] = torch.linspace(1, 2, 512)
    reached = (spikes / norm.rms(spikes)).max().item()
    assert 0.9 * norm.bound < reached <= norm.bound
    assert (gaussian(64, 1024) ** 9 / norm.rms(gaussian(64, 1024) ** 9)).abs().max() <= norm.bound


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    torch._dynamo.reset()
    x = gaussian(16, 256)
    compiled = torch.compile(lambda x: estimate(x, "rceil", eps=1e-5), fullgraph=True)
    torch.testing.assert_close(compiled(x), estimate(x, "rceil", eps=1e-5), rtol=1e-6, atol=0)


def test_formats_without_powers_of_two_as_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match="format: NVFP4 has E4M3 scales"):
        PostRoundMXNorm(64, 16, fmt="NVFP4")
