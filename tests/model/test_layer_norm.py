"""LayerNorm, alone and fused with a linear, agrees with torch in float64, and with casts with its formulas."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from appendix_e import (
    BOUNDS,
    CAST,
    EPS,
    IN,
    OUT,
    RMS,
    UNIT,
    UNQUANTISED,
    WITH_BIAS,
    Inputs,
    array,
    assert_fits,
    fits,
    inputs,
    layer_norm_references,
    references,
    run,
)
from each import each
from gemms import linear

from mxstudy import config
from mxstudy.config import PRECISIONS, BlockCast, Gemms
from mxstudy.model import LayerNorm, NormLinear, RMSNorm
from mxstudy.model.norm import build_exact_norm, build_norm
from mxstudy.numerics.gemms import Bounds, forward_gemm
from mxstudy.numerics.norm_linear import norm_linear, rms_exact, row_mean
from mxstudy.reader import ConfigError

with_and_without_bias = each("bias", [True, False], ids=["bias", "no_bias"])
every_dtype = each("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def given_with(bias: bool, dtype: torch.dtype, spread: int = 12) -> Inputs:
    """Return rows far from a mean of 0, and a bias of the size of the gain."""
    given = inputs(dtype, spread=spread)
    given.x = (given.x.float() + 3 * given.x.float().abs().mean(-1, keepdim=True)).to(dtype)
    drawn = torch.randn(IN, generator=torch.Generator().manual_seed(1)).to(dtype)
    return dataclasses.replace(given, bias=drawn if bias else None)


def layer_norm(given: Inputs, gemms: Gemms, cast: BlockCast = CAST, **options: object) -> list[torch.Tensor]:
    return run(given, RMS["exact"], False, gemms, cast, centers=True, **options)


def filled(norm: LayerNorm, given: Inputs) -> LayerNorm:
    with torch.no_grad():
        norm.weight.copy_(given.gain)
        if norm.bias is not None:
            norm.bias.copy_(given.bias)
    return norm


# ------------------------------------------------------------------------------------------ fused to a linear


@each("name", ["fp32", "mxfp8", "mxfp8_e5m2_grad", "mx_mix", "mxfp8_bf16_act", "mxfp8_bf16_weight"])
@with_and_without_bias
@every_dtype
def test_gradients_with_quantised_operands(name: str, bias: bool, dtype: torch.dtype) -> None:
    given = given_with(bias, dtype)
    assert_fits(layer_norm(given, PRECISIONS[name]), layer_norm_references(given, RMS["exact"], PRECISIONS[name]))


def test_block_size_rule_and_rounding_reach_the_casts() -> None:
    given, cast = given_with(True, torch.float32), BlockCast(16, "even", "away")
    got = layer_norm(given, PRECISIONS["mxfp8"], cast)
    assert_fits(got, layer_norm_references(given, RMS["exact"], PRECISIONS["mxfp8"], cast))


@every_dtype
def test_wrong_readings_would_be_seen(dtype: torch.dtype) -> None:
    """RMSNorm in its place would be seen, and so would a missing bias.

    A missing bias shows in H and dW, because dx and dgain do not read it.
    """
    given = given_with(True, dtype)
    got = layer_norm(given, PRECISIONS["mxfp8"])
    without = dataclasses.replace(given, bias=None)
    for name, one, other in zip(
        WITH_BIAS, got, references(given, RMS["exact"], False, PRECISIONS["mxfp8"]), strict=False
    ):
        assert fits(one, other).mean() < 0.7, name
    biased = dict(zip(WITH_BIAS, got, strict=True))
    plain = dict(zip(WITH_BIAS, layer_norm_references(without, RMS["exact"], PRECISIONS["mxfp8"]), strict=False))
    assert {name: bool(fits(biased[name], plain[name]).all()) for name in plain} == {
        "H": False,
        "dx": True,
        "dgain": True,
        "dW": False,
    }


@with_and_without_bias
def test_unquantised_it_is_torchs_layer_norm_and_linear(bias: bool) -> None:
    given = given_with(bias, torch.float32, spread=0)
    tensors = (given.x, given.gain, given.weight, *((given.bias,) if bias else ()))
    x, gain, weight, *shift = (t.double().requires_grad_() for t in tensors)
    h = F.linear(F.layer_norm(x, (IN,), gain, *shift, eps=EPS), weight)
    h.backward(given.dh.double())
    wanted = [h, x.grad, gain.grad, weight.grad, *(t.grad for t in shift)]
    for name, got, want in zip(WITH_BIAS, layer_norm(given, UNQUANTISED), wanted, strict=bias):
        assert (got - want).norm() < 1e-6 * want.norm(), name


def test_dx_adds_up_to_nothing_and_ignores_what_is_added_to_x() -> None:
    """What LayerNorm divides out has no gradient. The others' forward is that of the shifted row."""
    given = given_with(True, torch.float32, spread=2)
    dx = layer_norm(given, UNQUANTISED)[1]
    assert (dx.sum(-1).abs() < 1e-5 * dx.abs().sum(-1)).all()
    shifted = dataclasses.replace(given, x=given.x + 4 * given.x.abs().amax(-1, keepdim=True))
    for one, other in zip(layer_norm(given, UNQUANTISED), layer_norm(shifted, UNQUANTISED), strict=True):
        assert (one - other).norm() < 1e-5 * one.norm()


def test_a_large_mean_does_not_cost_the_variance_its_digits() -> None:
    """The mean is subtracted before the square: E[x^2] - E[x]^2 in FP32 would be off by 6 % here."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) + 1000
    want = F.layer_norm(x.double(), (256,), eps=EPS)
    norm = LayerNorm(256)
    assert torch.allclose(norm.normalize(x).double(), want, atol=1e-4)
    assert not torch.allclose(RMSNorm(256).normalize(x).double(), want, atol=0.1)


@each("frozen", ["x", "gain", "weight", "bias"])
def test_only_some_gradients_are_wanted(frozen: str) -> None:
    given = given_with(True, torch.float32)
    want = dict(zip(("x", "gain", "weight", "bias"), layer_norm(given, PRECISIONS["mxfp8"])[1:], strict=True))
    leaves = {name: getattr(given, name).clone().requires_grad_(name != frozen) for name in want}
    options = {"rms": RMS["exact"], "bounds": BOUNDS, "fold_gain": False, "centers": True}
    norm_linear(**leaves, **options, linear=linear(PRECISIONS["mxfp8"])).backward(given.dh)
    for name, leaf in leaves.items():
        assert leaf.grad is None if name == frozen else torch.equal(leaf.grad, want[name])


def test_a_bias_beside_a_folded_gain_is_refused() -> None:
    with pytest.raises(ConfigError, match="fold_gain: the weight takes up a gain, not a bias"):
        run(given_with(True, torch.float32), RMS["exact"], True, UNQUANTISED, centers=True)


@pytest.mark.slow
@pytest.mark.parametrize(("bias", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=str)
def test_compiled(bias: bool, dtype: torch.dtype) -> None:
    """The compiled mean may differ in its last bits, and then a few elements are quantised to a neighbour.

    Without casts, results lie within the error bounds of the eager ones, whatever the order of a processor's sums.
    """
    torch._dynamo.reset()
    given = given_with(bias, dtype, spread=0)
    compiled = torch.compile(norm_linear, fullgraph=True)
    with inductor.patch(emulate_precision_casts=True):
        cast, plain = (layer_norm(given, PRECISIONS[name], call=compiled) for name in ("mxfp8", "fp32"))
    for one, other in zip(cast, layer_norm(given, PRECISIONS["mxfp8"]), strict=True):
        assert (one.double() - other.double()).norm() < max(1e-3, UNIT[dtype]) * other.double().norm()
    assert_fits(plain, layer_norm_references(given, RMS["exact"], PRECISIONS["fp32"]))


# ------------------------------------------------------------------------------------------------------ modules


@with_and_without_bias
@every_dtype
def test_alone_it_is_torchs_rounded_once(bias: bool, dtype: torch.dtype) -> None:
    """The result is rounded to x's dtype once.

    Before, mean, difference, RMS (two), quotient, product and sum are rounded to FP32.
    """
    given = given_with(bias, dtype, spread=2)
    norm = filled(LayerNorm(IN, bias=bias), given)
    got = norm(given.x)
    shift = given.bias.double() if bias else None
    want = F.layer_norm(given.x.double(), (IN,), given.gain.double(), shift, eps=EPS)
    assert got.dtype == dtype
    assert ((got.double() - want).abs() <= (UNIT[dtype] + 7 * 2.0**-24) * want.abs() + 2e-6).all()


@with_and_without_bias
@every_dtype
def test_norm_linear_module(bias: bool, dtype: torch.dtype) -> None:
    """Parameters are in FP32, and cast to x's dtype first."""
    given = given_with(bias, dtype)
    layer = NormLinear(filled(LayerNorm(IN, bias=bias), given), OUT, init_std=0.02)
    layer.gemms, layer.cast = PRECISIONS["mxfp8"].filled(CAST), CAST
    with torch.no_grad():
        layer.weight.copy_(given.weight)
    x = given.x.clone().requires_grad_()
    h = layer(x)
    h.backward(given.dh)
    parameters = [layer.norm.weight, layer.weight, *([layer.norm.bias] if bias else [])]
    assert {parameter.grad.dtype for parameter in parameters} == {torch.float32}
    got = [h.detach(), x.grad, *(parameter.grad.to(dtype) for parameter in parameters)]
    for one, other in zip(got, layer_norm(given, PRECISIONS["mxfp8"]), strict=True):
        assert torch.equal(one, other)


@every_dtype
def test_without_affine_it_has_no_parameters_and_a_gain_of_1(dtype: torch.dtype) -> None:
    given = dataclasses.replace(given_with(False, dtype), gain=torch.ones(IN, dtype=dtype))
    layer = NormLinear(LayerNorm(IN, affine=False), OUT, init_std=0.02)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    layer.gemms, layer.cast = PRECISIONS["mxfp8"].filled(CAST), CAST
    with torch.no_grad():
        layer.weight.copy_(given.weight)
    x = given.x.clone().requires_grad_()
    h = layer(x)
    h.backward(given.dh)
    want_h, want_dx, _, want_dw = layer_norm(given, PRECISIONS["mxfp8"])
    for one, other in zip((h, x.grad, layer.weight.grad.to(dtype)), (want_h, want_dx, want_dw), strict=True):
        assert torch.equal(one, other)
    norm, with_gain = LayerNorm(IN, affine=False), LayerNorm(IN)
    with_gain.reset_parameters()
    assert torch.equal(norm(given.x), with_gain(given.x))


def test_the_bound_is_reached_by_a_lone_spike_and_by_nothing_passed() -> None:
    size = 256
    norm = LayerNorm(size, eps=0.0)
    assert norm.bound == pytest.approx(255**0.5)
    spike = torch.zeros(2, size)
    spike[0, 3], spike[1, 200] = 1.0, -1e10
    torch.testing.assert_close(norm.normalize(spike + 1).abs().amax(-1)[0].item(), norm.bound, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.normalize(spike).abs().amax(-1)[1].item(), norm.bound, rtol=1e-6, atol=0)
    rows = torch.randn(64, size, generator=torch.Generator().manual_seed(0))
    for x in (rows, rows**9, spike + 1e-3 * rows[:2], rows.abs().log().exp2()):
        assert norm.normalize(x).abs().max() <= norm.bound * (1 + 2e-6)


@with_and_without_bias
def test_the_tensor_scale_of_nvfp4_is_that_of_bound_gain_and_bias(bias: bool) -> None:
    given = given_with(bias, torch.float32, spread=1)
    layer = NormLinear(filled(LayerNorm(IN, bias=bias), given), OUT, init_std=0.02)
    nvfp4, layer.cast = linear(PRECISIONS["nvfp4_forward_only"], BlockCast(16)), BlockCast(16)
    layer.gemms = nvfp4.gemms
    centered = given.x - row_mean(given.x)
    with torch.no_grad():
        layer.weight.copy_(given.weight)
        y = centered / rms_exact(centered, EPS) * given.gain + (given.bias if bias else 0)
        limit = torch.tensor(layer.norm.bound) * given.gain.abs().max() + (given.bias.abs().max() if bias else 0)
        assert y.abs().max() <= limit
        want = forward_gemm(y, given.weight, nvfp4, torch.float32, Bounds(limit, limit))
        assert torch.equal(layer(given.x), want)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    given = given_with(True, torch.float32)
    clean = layer_norm(given, PRECISIONS["mxfp8"])[0]
    given.x[5, 7] = torch.inf
    h = layer_norm(given, PRECISIONS["mxfp8"])[0]
    assert h[5].isnan().all()
    assert torch.equal(h[:5], clean[:5])


# ------------------------------------------------------------------------------------------------------- config


def test_the_options_reach_the_norm() -> None:
    cast = BlockCast()
    for build in (lambda norm: build_norm(norm, 64, cast), lambda norm: build_exact_norm(norm, 64)):
        assert {n for n, _ in build(config.LayerNorm()).named_parameters()} == {"weight"}
        assert {n for n, _ in build(config.LayerNorm(bias=True)).named_parameters()} == {"weight", "bias"}
        assert not list(build(config.LayerNorm(affine=False)).parameters())
        norm = build(config.LayerNorm(eps=3.0))
        assert isinstance(norm, LayerNorm)
        assert norm.eps == 3.0
    assert isinstance(build_exact_norm(config.MXNorm(p=1.0), 64), RMSNorm)


def test_a_bias_without_affine_is_refused() -> None:
    with pytest.raises(ConfigError, match="bias: without affine a norm has no parameters"):
        config.LayerNorm(affine=False, bias=True)


def test_new_parameters_are_gain_1_and_bias_0() -> None:
    norm = LayerNorm(8, bias=True)
    norm.reset_parameters()
    assert array(norm.weight[None]).tolist() == [[1.0] * 8]
    assert array(norm.bias[None]).tolist() == [[0.0] * 8]
