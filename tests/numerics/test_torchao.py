"""The casts against torchao's `to_mx`: codes and scales bit-equal where both mean the same.

Left out, because torchao (0.17, 0.18) departs there from the OCP MX specification and from this project:
- Inf in a block: torchao gives a finite scale code (RCEIL 254, the others 255 - emax); here it is NaN's, 0xFF.
- k = -127: torchao divides by 2^-126 (FLOOR, CEIL, EVEN) or by 1 (RCEIL), since Triton flushes the scale 2^-127.
- RCEIL takes ceil(log2(fp32(absmax / max))) in float32: a few units in the last place above max * 2^k the logarithm
  rounds down to k and the block saturates; here the comparison is exact.
It also takes only the last axis, contiguous, and rounds half to even.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blocks import KINDS, every_kind, gaussian
from reference import SCALE_RULES, quantize_array

from mxstudy.numerics import FORMATS, quantize

FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
every_format = pytest.mark.parametrize("fmt", list(FLOAT8))
every_rule = pytest.mark.parametrize("rule", SCALE_RULES)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def to_mx(x: torch.Tensor, fmt: str, block_size: int, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Element and scale codes, uint8."""
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mode = getattr(config.ScaleCalculationMode, rule.upper())
    scales, codes = mx_tensor.to_mx(x, FLOAT8[fmt], block_size, mode)
    return codes.view(torch.uint8), scales.view(torch.uint8)


def comparable(x: torch.Tensor, fmt: str, rule: str) -> torch.Tensor:
    """Blocks outside of what the module's docstring leaves out."""
    absmax = x.float().abs().amax(-1)
    kept = absmax.isfinite() & (absmax >= 2.0 ** (FORMATS[fmt].emax - 125))
    if rule == "rceil":
        fraction, _ = torch.frexp(absmax.double() / FORMATS[fmt].max)
        kept &= ~((fraction > 0.5) & (fraction < 0.5 * (1 + 2.0**-15)))
    return kept


@every_format
@every_rule
@every_dtype
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_every_kind_of_block(fmt: str, rule: str, dtype: torch.dtype, block_size: int) -> None:
    x = torch.tensor(every_kind(fmt, block_size, per_kind=50, seed=20)).to(dtype)
    x = x[comparable(x, fmt, rule)]
    assert len(x) > 50 * (len(KINDS) + 1) // 2
    codes, scales = to_mx(x, fmt, block_size, rule)
    got = quantize(x, fmt, block_size, scale_rule=rule)
    assert torch.equal(got.scales, scales)
    assert torch.equal(got.codes, codes)


@every_format
@every_rule
@every_dtype
def test_gaussians_without_exception(fmt: str, rule: str, dtype: torch.dtype) -> None:
    x = torch.tensor(gaussian(np.random.default_rng(21), (4096, 32))).to(dtype)
    codes, scales = to_mx(x, fmt, 32, rule)
    got = quantize(x, fmt, scale_rule=rule)
    assert torch.equal(got.scales, scales)
    assert torch.equal(got.codes, codes)


@every_format
@every_rule
def test_zero_and_nan_blocks(fmt: str, rule: str) -> None:
    x = torch.zeros(2, 32)
    x[1, 3] = torch.nan
    codes, scales = to_mx(x, fmt, 32, rule)
    got = quantize(x, fmt, scale_rule=rule)
    assert scales.flatten().tolist() == got.scales.flatten().tolist() == [0, 255]
    assert torch.equal(got.codes[0], codes[0])


@every_format
@every_rule
def test_decoding(fmt: str, rule: str) -> None:
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = torch.tensor(every_kind(fmt, 32, per_kind=50, seed=22))
    got = quantize(x, fmt, scale_rule=rule)
    scales, codes = got.scales.view(torch.float8_e8m0fnu), got.codes.view(FLOAT8[fmt])
    want = mx_tensor.to_dtype(codes, scales, FLOAT8[fmt], 32, torch.float32)
    assert torch.equal(got.dequantize().nan_to_num(nan=1e30), want.nan_to_num(nan=1e30))


def test_rceil_is_exact_one_unit_above_the_threshold() -> None:
    """The documented departure, on this project's side: 448 * 2^k fits, the next float32 does not."""
    top = torch.tensor(448.0) * 2.0 ** torch.arange(-100, 110)
    above = torch.nextafter(top, torch.tensor(torch.inf))
    for absmax, k in ((top, torch.arange(-100, 110)), (above, torch.arange(-99, 111))):
        x = torch.zeros(len(absmax), 32)
        x[:, 5] = -absmax
        assert torch.equal(quantize(x, "E4M3").scales[:, 0].int() - 127, k.int())
        assert (quantize_array(x.double().numpy(), "E4M3")[1][:, 0] == k.numpy() + 127).all()
