"""Casts reproduce the instability paper's public code: blocks filled with zeros, a bump of the wrong elements."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from each import each
from gemms import assert_gemms, linear
from reference import Array, fake_quantize_array, to_dtype

from mxstudy.config import PRECISIONS
from mxstudy.kernels.native import why_not_torchao
from mxstudy.numerics.cast import BlockCast, block_cast, quantize
from mxstudy.numerics.formats import FORMATS
from mxstudy.numerics.gemms import mx_linear
from mxstudy.numerics.quality import is_max, overflows
from mxstudy.reader import ConfigError

CODE = BlockCast(scale_rule="floor", rounding="away", operand_pre_round=True)
BUMPED = BlockCast(scale_rule="code_bump", rounding="away", operand_pre_round=True)
PADDED = BlockCast(scale_rule="floor", rounding="away", operand_pre_round=True, pad_blocks=True)


def normals(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------- code_bump


def bumped_row(row: list[float]) -> list[float]:
    """Cast one row to E4M3, element by element, as microxcaling with the code's bump: half away, saturated."""
    blocks = [row[start : start + 32] for start in range(0, len(row), 32)]
    raised = []
    for place in range(32):
        largest = max(abs(block[place]) for block in blocks)
        raised.append(largest > 0 and largest > 1.75 * 2.0 ** math.floor(math.log2(largest)))
    decoded = []
    for block in blocks:
        absmax = max(map(abs, block)) or 2.0**-126
        for place, x in enumerate(block):
            scale = 2.0 ** max(math.floor(math.log2(absmax)) + raised[place] - 8, -127)
            magnitude = min(abs(x) / scale, 448.0)
            step = 2.0 ** (max(math.floor(math.log2(magnitude)) if magnitude else -6, -6) - 3)
            decoded.append(math.copysign(min(math.floor(magnitude / step + 0.5) * step, 448.0) * scale, x))
    return decoded


def bf16(x: torch.Tensor) -> Array:
    return to_dtype(x.double().numpy(), "bfloat16", "away")


@pytest.mark.parametrize("axis", [-1, -2])
def test_a_bump_of_the_wrong_elements(axis: int) -> None:
    """The bits agree over 40 powers of two, with a zero block and one whose scale is the smallest."""
    x = normals(96, 192) * 2.0 ** torch.linspace(-20, 20, 192).round()
    x[3, :32], x[:32, 7], x[5, 64:96] = 0.0, 0.0, 1.9 * 2.0**-120
    rows = bf16(x) if axis == -1 else bf16(x).T
    want = np.array([bumped_row(row.tolist()) for row in rows])
    got = block_cast(x, "E4M3", axis, BUMPED)
    assert np.array_equal(got.dequantize().double().numpy(), want if axis == -1 else want.T)
    assert (got.values.shape, got.scales.shape, got.block_size) == (x.shape, x.shape, 1)


def test_most_of_what_overflows_stays_clamped() -> None:
    """In Gaussian rows of 2048, 92.0 % of what overflows stays clamped (measured on that code).

    With rceil 31 % of it are still the largest number.
    """
    x = normals(512, 2048)
    largest = block_cast(x, "E4M3", -1, CODE)
    clamped = overflows(largest, x) & is_max(largest)
    limit = largest.dequantize().abs()
    shares = {
        rule: (block_cast(x, "E4M3", -1, BlockCast(scale_rule=rule, rounding="away")).dequantize().abs() == limit)[
            clamped
        ]
        for rule in ("code_bump", "rceil")
    }
    assert shares["code_bump"].double().mean().item() == pytest.approx(0.92, abs=0.01)
    assert shares["rceil"].double().mean().item() == pytest.approx(0.31, abs=0.02)


def test_replicas_of_a_stack_share_no_bump() -> None:
    x, weight = normals(3, 64, 96), normals(3, 32, 96, seed=1)
    x[1] *= torch.nan
    bumped = linear(PRECISIONS["mxfp8"], BUMPED)
    together = mx_linear(x, weight, bumped)
    for replica in (0, 2):
        assert torch.equal(together[replica], mx_linear(x[replica], weight[replica], bumped))


def test_not_finite_elements_are_their_own_blocks_alone() -> None:
    x = normals(1, 96)
    x[0, 40], x[0, 70] = torch.nan, torch.inf
    got = block_cast(x, "E4M3", -1, BUMPED).dequantize()
    assert got[0, 32:].isnan().all()
    x[0, 32:] = 0
    assert torch.equal(got[0, :32], block_cast(x, "E4M3", -1, BUMPED).dequantize()[0, :32])


def test_the_bump_is_e4m3s_and_no_rule_of_blocks() -> None:
    with pytest.raises(ConfigError, match="scale_rule: code_bump is for E4M3 in blocks along one axis, not"):
        block_cast(normals(1, 32), "E5M2", -1, BUMPED)
    with pytest.raises(ConfigError, match="scale_rule: 'code_bump' is not a choice"):
        quantize(normals(1, 32), "E4M3", scale_rule="code_bump")


# ------------------------------------------------------------------------------------------------------------ padding


@each("fmt", [name for name in FORMATS if name != "NVFP4"])
@each(("shape", "axis"), [((5, 85), -1), ((85, 5), 0), ((2, 33, 5), 1), ((3, 7), -1), ((3, 64), -1)])
def test_a_part_of_a_block_is_filled_with_zeros(fmt: str, shape: tuple[int, ...], axis: int) -> None:
    x = normals(*shape)
    got = block_cast(x, fmt, axis, PADDED)
    want = fake_quantize_array(x.double().numpy(), fmt, axis, **dataclasses.asdict(PADDED))
    assert np.array_equal(got.dequantize().double().numpy(), want)
    assert got.values.shape == x.shape
    assert got.scales.shape[axis] == math.ceil(shape[axis] / 32)
    if shape[axis] % 32:
        with pytest.raises(ConfigError, match="block_size: 32 does not divide"):
            block_cast(x, fmt, axis, CODE)


def test_the_bump_of_a_part_of_a_block() -> None:
    x = normals(4, 85)
    filled = torch.cat((x, torch.zeros(4, 11)), -1)
    want = np.array([bumped_row(row.tolist()) for row in bf16(filled)])[:, :85]
    both = BlockCast(scale_rule="code_bump", rounding="away", operand_pre_round=True, pad_blocks=True)
    assert np.array_equal(block_cast(x, "E4M3", -1, both).dequantize().double().numpy(), want)


def test_the_three_gemms_of_sizes_that_are_no_multiples() -> None:
    """Each operand of 45 tokens, 70 inputs and 33 outputs is filled up along its own contraction axis."""
    for row in ("mx_mix", "mxfp8_act_only"):
        assert_gemms(normals(45, 70), normals(33, 70, seed=1), normals(45, 33, seed=2), PRECISIONS[row], PADDED)


def test_the_hardware_has_whole_blocks() -> None:
    for cast, named in ((PADDED, "forward_x.pad=true"), (BUMPED, "forward_x.scale_rule=code_bump")):
        assert named in str(why_not_torchao(PRECISIONS["mxfp8"].filled(cast), torch.bfloat16))
    assert why_not_torchao(PRECISIONS["mxfp8"].filled(CODE), torch.bfloat16) is None
