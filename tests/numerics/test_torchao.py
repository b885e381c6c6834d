"""Codes and scales have the bits of torchao's `to_mx` and `nvfp4_quantize`, where both mean the same.

These are left out, because torchao (0.17, 0.18) departs there from the OCP MX specification and from this project:
- Inf in a block: torchao gives a finite scale code (RCEIL 254, the others 255 - emax); here it is NaN's, 0xFF.
- NaN in a block: the scale codes are equal, the element codes mean nothing and are not compared.
- The elements under scale code 0: torchao divides by 2^-126 (FLOOR, CEIL, EVEN) or by 1 (RCEIL) instead of 2^-127,
  since Triton flushes that to zero. The scale codes themselves are equal.
- RCEIL takes ceil(log2(fp32(absmax / max))) in float32: up to some 40 units in the last place (2^-18, relative) above
  max * 2^k the logarithm rounds down to k and the block saturates; here the comparison is exact.
- NVFP4 with NaN or Inf: torchao's float8 cast decides. Its tensor scale has no lower bound: zero for a tensor of
  zeros, and below 2^-121 its reciprocal overflows; here it is at least 2^-120. torchao 0.17 rounds the scales of a bf16
  tensor to bf16 where it decodes, so float32 tensors are compared, and has no scales of experts.
It also takes only the last axis, contiguous, rounds half to even, does not take float16, and packs E2M1 but not FP6.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from bits import assert_same_bits, every_rule
from blocks import KINDS, any_exponent, every_kind, gaussian, huge, one_binade_per_block, ties
from each import each
from reference import ELEMENTS, NAN_SCALE, quantize_array

from mxstudy.numerics import FORMATS, quantize

every_dtype = each("dtype", [torch.float32, torch.bfloat16])

every_format = each("fmt", [name for name in ELEMENTS if name != "E1M2"])  # torchao has no format with equal steps


def torchao(module: str) -> ModuleType:
    return pytest.importorskip(f"torchao.prototype.mx_formats.{module}")


def element(fmt: str) -> torch.dtype | str:
    """Return torchao's name of an element format."""
    float8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "E2M1": torch.float4_e2m1fn_x2}
    return float8.get(fmt) or getattr(torchao("constants"), f"DTYPE_FP6_{fmt}")


def to_mx(x: torch.Tensor, fmt: str, block_size: int, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return element codes, E2M1's two per byte, and scale codes, uint8."""
    mode = getattr(torchao("config").ScaleCalculationMode, rule.upper())
    scales, codes = torchao("mx_tensor").to_mx(x, element(fmt), block_size, mode)
    return codes.view(torch.uint8), scales.view(torch.uint8)


def comparable(x: torch.Tensor, fmt: str, rule: str) -> torch.Tensor:
    """Return the blocks whose scales both define alike, by the module's docstring."""
    absmax = x.float().abs().amax(-1)
    kept = ~absmax.isinf()
    if rule == "rceil":
        fraction, _ = torch.frexp(absmax.double() / FORMATS[fmt].max)
        kept &= ~((fraction > 0.5) & (fraction < 0.5 * (1 + 2.0**-17)))
    return kept


@pytest.mark.integration
@every_format
@every_rule
@every_dtype
@each("block_size", [16, 32, 64])
def test_every_kind_of_block(fmt: str, rule: str, dtype: torch.dtype, block_size: int) -> None:
    x = torch.tensor(every_kind(fmt, block_size, per_kind=50, seed=20)).to(dtype)
    x = x[comparable(x, fmt, rule)]
    assert len(x) > 50 * (len(KINDS) + 1) * 0.85
    codes, scales = to_mx(x, fmt, block_size, rule)
    got = quantize(x, fmt, block_size, scale_rule=rule)
    assert torch.equal(got.scales, scales)
    kept = ((scales != 0) & (scales != NAN_SCALE)).squeeze(-1)
    assert kept.sum() > 50 * (len(KINDS) + 1) * 0.6
    assert torch.equal(got.codes[kept], codes[kept])


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
    x = torch.tensor(every_kind(fmt, 32, per_kind=50, seed=22))
    got = quantize(x, fmt, scale_rule=rule)
    scales = got.scales.view(torch.float8_e8m0fnu)
    codes = got.codes.view(element(fmt)) if FORMATS[fmt].bits == 8 else got.codes
    want = torchao("mx_tensor").to_dtype(codes, scales, element(fmt), 32, torch.float32)
    assert_same_bits(got.dequantize(), want)


# ---------------------------------------------------------------------------- the documented departures, on either side


def test_rceil_is_exact_one_unit_above_the_threshold() -> None:
    """448 * 2^k fits, and the next float32 does not."""
    top = torch.tensor(448.0) * 2.0 ** torch.arange(-100, 110)
    above = torch.nextafter(top, torch.tensor(torch.inf))
    for absmax, k in ((top, torch.arange(-100, 110)), (above, torch.arange(-99, 111))):
        x = torch.zeros(len(absmax), 32)
        x[:, 5] = -absmax
        assert torch.equal(quantize(x, "E4M3").scales[:, 0].int() - 127, k.int())
        assert (quantize_array(x.double().numpy(), "E4M3")[1][:, 0] == k.numpy() + 127).all()


@every_format
def test_scale_code_0_divides_by_2_to_the_minus_127(fmt: str) -> None:
    """So the largest block under it has an element of emax. torchao's is one binade lower, or nothing."""
    x = torch.zeros(1, 32)
    x[0, 0] = 2.0 ** (FORMATS[fmt].emax - 127)
    for rule in ("floor", "rceil"):
        got, (codes, scales) = quantize(x, fmt, scale_rule=rule), to_mx(x, fmt, 32, rule)
        assert got.scales.item() == scales.item() == 0
        assert got.values[0, 0] == 2.0 ** FORMATS[fmt].emax
        assert got.codes[0, 0] != codes[0, 0]
        assert got.dequantize()[0, 0] == x[0, 0]


# --------------------------------------------------------------------------------------------------------------- NVFP4


def tiny(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Return tensors with scales of 2^-119, close to the least, whose block scales are mostly below E4M3's range."""
    return (rng.uniform(-1, 1, shape) * 2.0 ** rng.uniform(-130, -108, (shape[0], 1))).astype(np.float32)


def spread(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-12, 0, (shape[0], 1))).astype(np.float32)


nvfp4_inputs = each(
    "make",
    [gaussian, spread, tiny, huge, any_exponent, one_binade_per_block, lambda *a: ties(*a, ELEMENTS["E2M1"])],
    ids=["gaussian", "spread", "tiny", "huge", "any_exponent", "one_binade_per_block", "ties"],
)


@nvfp4_inputs
@every_dtype
def test_nvfp4(make: object, dtype: torch.dtype) -> None:
    """The scale of the tensor is its own or another's, and torchao decodes from our codes."""
    ao = torchao("nvfp4_tensor")
    x = torch.tensor(make(np.random.default_rng(23), (512, 64))).to(dtype)
    x = torch.where(x.isfinite(), x, 0)  # the largest numbers of huge, in bf16
    own = ao.per_tensor_amax_to_scale(x.abs().amax())
    assert own > 2.0**-120
    for tensor_scale in (own, own * 0.3, own * 5):
        scales, codes = ao.nvfp4_quantize(x, 16, tensor_scale)
        got = quantize(x, "NVFP4", tensor_scale=None if tensor_scale is own else tensor_scale)
        assert_same_bits(got.tensor_scale, tensor_scale)
        assert torch.equal(got.scales.view(torch.uint8), scales.view(torch.uint8))
        assert torch.equal(got.codes, codes)
        theirs = ao.NVFP4Tensor(got.codes, got.scales, 16, torch.float32, got.tensor_scale)
        for output in (torch.float32, torch.bfloat16):
            assert_same_bits(got.dequantize(output), theirs.dequantize(output))


@nvfp4_inputs
def test_nvfp4_with_a_scale_a_row(make: object) -> None:
    """torchao's scale of each expert, [experts, 1, 1], becomes one per row if an expert is one row."""
    pytest.importorskip("torchao", minversion="0.18")
    ao = torchao("nvfp4_tensor")
    x = torch.tensor(make(np.random.default_rng(24), (256, 64)))
    rows = ao.per_tensor_amax_to_scale(x.abs().amax(1, keepdim=True)).clamp_min(2.0**-120)
    scales, codes = ao.nvfp4_quantize(x.unsqueeze(1), 16, rows.unsqueeze(1))
    got = quantize(x, "NVFP4", tensor_scale=rows)
    assert torch.equal(got.scales.view(torch.uint8), scales.reshape(256, 4).view(torch.uint8))
    assert torch.equal(got.codes, codes.squeeze(1))
    theirs = ao.NVFP4Tensor(codes, scales.unsqueeze(1), 16, torch.float32, rows.unsqueeze(1))
    assert_same_bits(got.dequantize(), theirs.dequantize(torch.float32).squeeze(1))


def test_a_tensor_of_zeros_is_where_nvfp4_parts() -> None:
    ao = torchao("nvfp4_tensor")
    assert ao.per_tensor_amax_to_scale(torch.zeros(())) == 0
    assert (quantize(torch.zeros(4, 16), "NVFP4").dequantize() == 0).all()
