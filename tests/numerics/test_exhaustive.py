"""Casts are right for every mantissa of a block's maximum with every mantissa of a value, and at FP32's ends.

A cast is homogeneous in powers of two until a scale reaches its clamp (test_a_power_of_two_moves_only_the_scale). So
the maxima of one binade stand for all, and every other binade is tested only at its thresholds.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bits import DECODED, assert_cast, assert_same_bits, every_format, every_rounding, every_rule
from blocks import from_bits
from reference import ELEMENTS, Array

from mxstudy.numerics import FORMATS, quantize

ULPS = np.array([-2, -1, 0, 1, 2])


def beside(values: Array) -> np.ndarray:
    """Return positive float32 values and their neighbours, up to two units in the last place away: [..., 5]."""
    return from_bits(values.astype(np.float32).view(np.int32)[..., None] + ULPS)


@pytest.mark.slow
@every_format
@every_rule
@every_rounding
def test_every_pair_of_bf16_mantissas(fmt: str, rule: str, rounding: str) -> None:
    """Each pair of 128 mantissas of the maximum and 128 of the value fills a block of 32, for both signs.

    A block has the value at gaps of 0 to 30 binades below its maximum. Where the gap is 0 and the value's mantissa is
    the larger one, the value is the maximum.
    """
    mantissas = 1 + np.arange(128) / 128
    blocks = np.empty((128, 128, 2, 32))
    blocks[..., 0] = mantissas[:, None, None] * [1, -1]
    blocks[..., 1:] = mantissas[:, None, None] * np.array([[-1], [1]]) * 2.0 ** -np.arange(31)
    assert_cast(torch.tensor(blocks.reshape(-1, 32), dtype=torch.float32), fmt, scale_rule=rule, rounding=rounding)


@pytest.mark.slow
@every_format
@every_rule
@every_rounding
def test_around_every_tie(fmt: str, rule: str, rounding: str) -> None:
    """Every element value, every midpoint, and float32 numbers beside them are cast under scales of four binades.

    7 bits of mantissa cannot reveal an element that is rounded twice.
    """
    grid = np.unique(np.abs(DECODED[fmt][np.isfinite(DECODED[fmt])]))
    points = np.concatenate([grid[1:], (grid[1:] + grid[:-1]) / 2])
    points = beside(np.outer(points, [0.5, 1, 2, 4])).flatten()
    element = ELEMENTS[fmt]
    for maximum in beside(np.array([1, 2, element.max / 2**element.emax, 1.9999])).flatten() * 2.0**element.emax:
        below = points[points <= maximum]
        values = np.resize(np.concatenate([below, -below]), (-(-2 * len(below) // 31), 31))
        blocks = np.concatenate([np.full((len(values), 1), maximum), values], 1)
        assert_cast(torch.tensor(blocks, dtype=torch.float32), fmt, scale_rule=rule, rounding=rounding)


@pytest.mark.integration
@every_format
@every_rule
@every_rounding
def test_the_thresholds_of_every_binade(fmt: str, rule: str, rounding: str) -> None:
    """Thresholds lie from FP32's smallest subnormal to its largest number.

    At the smallest k is clamped to -127, and the largest decodes to 2^128.
    """
    element = ELEMENTS[fmt]
    threshold = [1, element.max / 2**element.emax, 2 - 2.0 ** -(element.mantissa_bits + 1), 1.5]
    normal = beside(np.outer(threshold, 2.0 ** np.arange(-126, 128))).flatten()
    tiny = np.arange(1, 64) * 2.0**-149
    subnormal = beside(np.outer(threshold, 2.0 ** np.arange(-140, -126))).flatten()
    maxima = np.concatenate([normal, tiny, subnormal, [np.finfo(np.float32).max]]).astype(np.float32)
    ratios = (-1.0) ** np.arange(32) * np.geomspace(1, 2.0**-20, 32)
    assert_cast(torch.tensor((maxima[:, None] * ratios).astype(np.float32)), fmt, scale_rule=rule, rounding=rounding)


@every_format
def test_the_ends_by_hand(fmt: str) -> None:
    """E8M0's k = 127 is out of reach, because it would take a maximum of 2^127 * 2^emax."""
    emax, low = FORMATS[fmt].emax, 2.0**-127
    top = torch.finfo(torch.float32).max
    cases = {  # maximum of the block: its scale code by each rule, and its decoding under floor and ceil (or None)
        2.0**-149: ((0, 0, 0, 0), 0.0, 0.0),
        low * FORMATS[fmt].max: ((0, 1, 0, 0), low * FORMATS[fmt].max, None),
        low * 2.0**emax: ((0, 0, 0, 0), low * 2.0**emax, low * 2.0**emax),
        2.0**127: ((254 - emax,) * 4, 2.0**127, 2.0**127),
        top: ((254 - emax, 255 - emax, 255 - emax, 255 - emax), FORMATS[fmt].max * 2.0 ** (127 - emax), math.inf),
    }
    for maximum, (codes, floor, ceil) in cases.items():
        x = torch.zeros(32).index_fill(0, torch.tensor([7]), maximum)
        for sign in (1, -1):
            got = {rule: quantize(sign * x, fmt, scale_rule=rule) for rule in ("floor", "ceil", "rceil", "even")}
            assert tuple(q.scales.item() for q in got.values()) == codes, maximum
            assert got["floor"].dequantize()[7] == sign * floor
            assert ceil is None or got["ceil"].dequantize()[7] == sign * ceil


@every_format
@every_rule
@every_rounding
def test_zeros_keep_their_signs(fmt: str, rule: str, rounding: str) -> None:
    x = torch.tensor([0.0, -0.0]).repeat(3, 16)
    x[1, 5] = 1.0
    x[2, 5] = 2.0**-149
    got = quantize(x, fmt, scale_rule=rule, rounding=rounding)
    assert got.scales.flatten().tolist() == [0, 127 - FORMATS[fmt].emax, 0]
    keep = torch.arange(32) != 5
    assert_same_bits(got.values[:, keep], x[:, keep])
    assert_same_bits(got.dequantize()[:, keep], x[:, keep])
