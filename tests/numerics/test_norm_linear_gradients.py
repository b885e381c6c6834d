"""A norm, its gain and the linear behind it have the values and gradients of the MXNorm paper's appendix E."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from appendix_e import IN, RMS, Inputs, assert_fits, inputs, layer_norm_references, references, run

from mxstudy.config import PRECISIONS, Gemms
from mxstudy.numerics.norm_linear import NormBounds, weight_and_bounds

GIVEN = inputs(torch.float32, spread=3)
WITH_BIAS = dataclasses.replace(GIVEN, x=GIVEN.x + 2, bias=torch.randn(IN, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("gemms", [PRECISIONS["fp32"], PRECISIONS["mxfp8_e5m2_grad"]], ids=["fp32", "mxfp8"])
@pytest.mark.parametrize(("rms", "fold_gain"), [("exact", False), ("exact", True), ("p1", True), ("p2", False)])
def test_of_a_norm_without_centering(rms: str, fold_gain: bool, gemms: Gemms) -> None:
    assert_fits(run(GIVEN, RMS[rms], fold_gain, gemms), references(GIVEN, RMS[rms], fold_gain, gemms))


@pytest.mark.parametrize("gemms", [PRECISIONS["fp32"], PRECISIONS["mxfp8_e5m2_grad"]], ids=["fp32", "mxfp8"])
@pytest.mark.parametrize("rms", ["exact", "p1"])
def test_of_a_norm_whose_gain_is_folded_in_dgrad_too(rms: str, gemms: Gemms) -> None:
    want = references(GIVEN, RMS[rms], True, gemms, fold_gain_in_dgrad=True)
    assert_fits(run(GIVEN, RMS[rms], True, gemms, fold_gain_in_dgrad=True), want)


def test_a_bias_raises_the_bounds_by_what_its_transform_can_reach() -> None:
    """The orthonormal Hadamard transform of 16 equal numbers is 4 times one of them, and zeros."""
    weight, gain, bias = torch.ones(2, 32), torch.full((32,), -2.0), torch.full((32,), -3.0)
    same, bounds = weight_and_bounds(weight, gain, bias, NormBounds(forward=5.0, plain=4.0, tile=16), fold_gain=False)
    assert same is weight
    assert bounds == (5.0 * 2 + 4 * 3, 4.0 * 2 + 3)


@pytest.mark.parametrize("given", [WITH_BIAS, dataclasses.replace(WITH_BIAS, bias=None)], ids=["bias", "no bias"])
def test_of_layer_norm(given: Inputs) -> None:
    gemms = PRECISIONS["mxfp8"]
    got = run(given, RMS["exact"], False, gemms, centers=True)
    assert_fits(got, layer_norm_references(given, RMS["exact"], gemms))
