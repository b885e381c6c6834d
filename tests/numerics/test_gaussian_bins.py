"""The exact last bin of a Gaussian agrees with a count in ten million numbers, and with what must hold."""

from __future__ import annotations

import pytest
import torch
from each import slow_but

from mxstudy.numerics import quantize
from mxstudy.numerics.gaussian_bins import gaussian_last_bin
from mxstudy.numerics.quality import max_fraction, overflow_fraction
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration

X = torch.randn(10_000_000 // 64, 64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("fmt", slow_but(["E4M3", "E2M1"], ["E4M3", "E5M2", "E3M2", "E2M3", "E2M1"]))
@pytest.mark.parametrize(("rule", "block_size", "std"), [("floor", 32, 1.0), ("floor", 64, 0.7), ("rceil", 16, 1.0)])
def test_counts_agree(fmt: str, rule: str, block_size: int, std: float) -> None:
    found = gaussian_last_bin(fmt, block_size, rule, std)
    quantized = quantize(X * std, fmt, block_size, scale_rule=rule)
    deviation = 5 * (found.max / X.numel() * block_size / 8) ** 0.5  # counts within a block are correlated
    assert found.overflow == pytest.approx(overflow_fraction(quantized, X * std).item(), abs=deviation)
    assert found.max == pytest.approx(max_fraction(quantized).item(), abs=deviation)


def test_known_values() -> None:
    """Under floor it is 0.86 % in E4M3, or 1.15 % with what rounds to max. E5M2 has the same 1.75."""
    floor = gaussian_last_bin("E4M3", 32, "floor")
    assert (round(floor.overflow, 4), round(floor.max, 4)) == (0.0086, 0.0115)
    assert gaussian_last_bin("E5M2", 32, "floor").overflow == pytest.approx(floor.overflow, rel=1e-9)
    for rule in ("rceil", "ceil"):
        assert gaussian_last_bin("E4M3", 32, rule).overflow == 0
    assert gaussian_last_bin("E4M3", 32, "floor", 2.0) == pytest.approx(floor)
    assert gaussian_last_bin("E4M3", 32, "floor", 1.4) != pytest.approx(floor, rel=0.01)


def test_scales_that_are_no_powers_of_two_are_refused() -> None:
    with pytest.raises(ConfigError, match="format: NVFP4 has E4M3 scales"):
        gaussian_last_bin("NVFP4", 16)
