"""Norm, gain and linear in one, and the modules that use it, follow appendix E of the MXNorm paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch._inductor.config as inductor
from appendix_e import (
    BOUNDS,
    CAST,
    EPS,
    IN,
    NAMES,
    OPERANDS,
    OUT,
    RMS,
    TOKENS,
    UNQUANTISED,
    Inputs,
    Rms,
    array,
    assert_fits,
    fits,
    fp32,
    inputs,
    normalize,
    references,
    run,
)
from each import each
from gemms import linear, one_operand
from reference import to_dtype

from mxstudy.config import PRECISIONS, BlockCast
from mxstudy.model import MXLinear, MXNorm, NormLinear, PostRoundMXNorm, RMSNorm
from mxstudy.numerics import fake_quantize, quantize
from mxstudy.numerics.gemms import Bounds, forward_gemm, mx_linear
from mxstudy.numerics.norm_linear import norm_linear
from mxstudy.reader import ConfigError

every_rms = each("rms", RMS.values(), ids=RMS)
every_fold = each("fold_gain", [True, False], ids=["folded", "unfolded"])
every_dtype = each("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

# ------------------------------------------------------------------------------------------------- against appendix E


@pytest.mark.integration
@each("name", ["fp32", "mxfp8", "mxfp8_e5m2_grad", "mx_mix", "mxfp8_bf16_act", "mxfp8_bf16_weight"])
@every_rms
@every_fold
@every_dtype
@each("leading", [(TOKENS,), (4, 16)])
def test_gradients(name: str, rms: Rms, fold_gain: bool, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    given = inputs(dtype, leading)
    assert_fits(run(given, rms, fold_gain, PRECISIONS[name]), references(given, rms, fold_gain, PRECISIONS[name]))


@pytest.mark.integration
@each("operand", OPERANDS)
@every_rms
@every_fold
@every_dtype
def test_one_operand_quantised(operand: str, rms: Rms, fold_gain: bool, dtype: torch.dtype) -> None:
    """The other operands stay as they are, and what does not read the quantised one keeps its bits."""
    given, gemms = inputs(dtype), one_operand(operand, "E4M3")
    got, plain = run(given, rms, fold_gain, gemms), run(given, rms, fold_gain, UNQUANTISED)
    assert_fits(got, references(given, rms, fold_gain, gemms))
    changed = [name for name, a, b in zip(NAMES, got, plain, strict=True) if not torch.equal(a, b)]
    assert changed == {"forward": ["H"], "dgrad": ["dx", "dgain"], "wgrad": ["dW"]}[operand.split("_")[0]]


@each("arguments", [(16, "floor", "even"), (16, "even", "away"), (32, "ceil", "away")])
@every_fold
def test_block_size_rule_and_rounding_reach_the_casts(arguments: tuple[int, str, str], fold_gain: bool) -> None:
    given, cast = inputs(torch.float32), BlockCast(*arguments)
    for rms in RMS.values():
        got = run(given, rms, fold_gain, PRECISIONS["mxfp8"], cast)
        assert_fits(got, references(given, rms, fold_gain, PRECISIONS["mxfp8"], cast))


@every_fold
@every_dtype
def test_any_divisor(fold_gain: bool, dtype: torch.dtype) -> None:
    """The backward is the straight-through estimator with the saved value, whatever the forward divided by."""
    given = inputs(dtype)
    divisor = torch.rand(TOKENS, 1, generator=torch.Generator().manual_seed(1)) + 0.5
    calls = []

    def rms(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return divisor * (1 if len(calls) == 1 else 1e6)

    got = run(given, rms, fold_gain, PRECISIONS["mxfp8"])
    assert len(calls) == 1
    assert_fits(got, references(given, lambda x: divisor, fold_gain, PRECISIONS["mxfp8"]))


@every_dtype
def test_wrong_readings_would_be_seen(dtype: torch.dtype) -> None:
    """Wrong are a fold where there is none, the fused weight in the backward, and the gain inside the cast of wgrad."""
    given = inputs(dtype)
    for fold_gain in (True, False):
        got = run(given, RMS["p2"], fold_gain, PRECISIONS["mxfp8"])
        other = references(given, RMS["p2"], not fold_gain, PRECISIONS["mxfp8"])
        assert fits(got[0], other[0]).mean() < 0.5
        assert fits(got[3], other[3]).mean() < 0.9
    got = run(given, RMS["p2"], True, PRECISIONS["mxfp8"])
    fused = dataclasses.replace(given, weight=given.weight.float() * given.gain, gain=torch.ones(IN))
    for index in (1, 2):
        want = references(dataclasses.replace(fused, x=given.x.float()), RMS["p2"], True, PRECISIONS["mxfp8"])[index]
        assert fits(got[index], want).mean() < 0.5
    estimated = references(given, RMS["p2"], True, PRECISIONS["mxfp8"])
    exact = run(given, RMS["exact"], True, PRECISIONS["mxfp8"])
    assert all(fits(a, b).mean() < 0.5 for a, b in zip(exact, estimated, strict=True))


@every_fold
def test_unquantised_it_is_torchs_rms_norm_and_linear(fold_gain: bool) -> None:
    given = inputs(torch.float32, (4, 16), spread=0)
    x, gain, weight = (t.double().requires_grad_() for t in (given.x, given.gain, given.weight))
    normed = torch.nn.functional.rms_norm(x, (IN,), gain, eps=EPS)
    h = torch.nn.functional.linear(normed, weight)
    h.backward(given.dh.double())
    for name, got, want in zip(
        NAMES, run(given, RMS["exact"], fold_gain, UNQUANTISED), (h, x.grad, gain.grad, weight.grad), strict=True
    ):
        assert (got - want).norm() < 1e-6 * want.norm(), name


# ------------------------------------------------------------------------------------------------------ what is cast


@every_rms
@every_dtype
def test_the_forward_multiplies_the_decoded_norm(rms: Rms, dtype: torch.dtype) -> None:
    """A unit weight reveals the operand: Q(x / rms), from the unrounded quotient, with the gain folded or not."""
    given = dataclasses.replace(inputs(dtype), weight=torch.eye(IN, dtype=dtype))
    quotient = torch.tensor(normalize(array(given.x), array(rms(given.x))), dtype=torch.float32)
    gemms = one_operand("forward_x", "E4M3")
    for gain, fold_gain, operand in (
        (torch.ones(IN), True, quotient),
        (torch.ones(IN), False, quotient),
        (given.gain.float(), False, quotient * given.gain.float()),
    ):
        arguments = {"rms": rms, "bounds": BOUNDS, "fold_gain": fold_gain, "linear": linear(gemms)}
        h = norm_linear(given.x, gain.to(dtype), given.weight, **arguments)
        assert torch.equal(h, fake_quantize(operand, "E4M3").to(dtype))


def test_gain_times_weight_goes_unrounded_into_the_cast() -> None:
    """In bf16, too, the product is not rounded to bf16 before it is quantised."""
    given = inputs(torch.bfloat16)
    x = torch.eye(IN, dtype=torch.bfloat16)
    gemms = one_operand("forward_w", "E4M3")
    ones: Rms = lambda x: torch.ones(len(x), 1)  # noqa: E731
    h = norm_linear(x, given.gain, given.weight, rms=ones, bounds=BOUNDS, fold_gain=True, linear=linear(gemms))
    product = given.weight.float() * given.gain.float()
    assert torch.equal(h.T, fake_quantize(product, "E4M3").bfloat16())
    assert not torch.equal(h.T, fake_quantize(product.bfloat16(), "E4M3"))


# ------------------------------------------------------------------------------------------------------------- edges


@every_fold
def test_a_transposed_input_and_an_expanded_gradient(fold_gain: bool) -> None:
    given = inputs(torch.float32)
    strided = dataclasses.replace(given, x=given.x.T.contiguous().T, dh=torch.ones(()).expand(TOKENS, OUT))
    got = run(strided, RMS["p2"], fold_gain, PRECISIONS["mxfp8"])
    assert_fits(got, references(strided, RMS["p2"], fold_gain, PRECISIONS["mxfp8"]))


@each("frozen", ["x", "gain", "weight"])
@every_fold
def test_only_some_gradients_are_wanted(frozen: str, fold_gain: bool) -> None:
    given = inputs(torch.float32)
    want = dict(zip(("x", "gain", "weight"), run(given, RMS["p2"], fold_gain, PRECISIONS["mxfp8"])[1:], strict=True))
    leaves = {name: getattr(given, name).clone().requires_grad_(name != frozen) for name in want}
    h = norm_linear(**leaves, rms=RMS["p2"], bounds=BOUNDS, fold_gain=fold_gain, linear=linear(PRECISIONS["mxfp8"]))
    h.backward(given.dh)
    for name, leaf in leaves.items():
        assert leaf.grad is None if name == frozen else torch.equal(leaf.grad, want[name])


@each("operand", ["wgrad_dh", "wgrad_x"])
@every_fold
def test_tokens_that_do_not_fill_blocks_are_refused(operand: str, fold_gain: bool) -> None:
    given = inputs(torch.float32)
    given.x, given.dh = given.x[:40], given.dh[:40]
    with pytest.raises(ConfigError, match="40"):
        run(given, RMS["p2"], fold_gain, one_operand(operand, "E4M3"))
    forward_only = PRECISIONS["mxfp8_forward_only"]
    assert_fits(run(given, RMS["p2"], fold_gain, forward_only), references(given, RMS["p2"], fold_gain, forward_only))


@pytest.mark.slow
@pytest.mark.parametrize(("fold_gain", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=str)
def test_compiled(fold_gain: bool, dtype: torch.dtype) -> None:
    """With the divisor given, the compiled operands have the same bits, so the same references hold.

    Without `emulate_precision_casts`, which the training runtime sets too, Inductor drops roundings to bf16.
    """
    torch._dynamo.reset()
    given = inputs(dtype)
    divisor = torch.rand(TOKENS, 1, generator=torch.Generator().manual_seed(1)) + 0.5
    compiled = torch.compile(norm_linear, fullgraph=True)
    for name in ("mxfp8", "bf16"):
        with inductor.patch(emulate_precision_casts=True):
            got = run(given, lambda x: divisor, fold_gain, PRECISIONS[name], call=compiled)
        assert_fits(got, references(given, lambda x: divisor, fold_gain, PRECISIONS[name]))


# ----------------------------------------------------------------------------------------------------------- modules


MODULES: dict[str, tuple[Callable[[], RMSNorm | MXNorm], Rms, bool]] = {
    "rmsnorm": (lambda: RMSNorm(IN), RMS["exact"], False),
    "rmsnorm_folded": (lambda: RMSNorm(IN, fold_gain=True), RMS["exact"], True),
    "mxnorm_p1": (lambda: MXNorm(IN, p=1.0), RMS["p1"], True),
    "mxnorm_p2": (lambda: MXNorm(IN, p=2.0), RMS["p2"], True),
    "mxnorm_postround": (lambda: PostRoundMXNorm(IN), RMS["postround"], True),
}
every_module = each(("build", "rms", "fold_gain"), MODULES.values(), ids=MODULES)


@every_module
@every_dtype
def test_norm_linear_module(build: Callable, rms: Rms, fold_gain: bool, dtype: torch.dtype) -> None:
    """Parameters are in FP32, and cast to x's dtype first. The precision is what the module was given."""
    given = inputs(torch.float32)
    layer = NormLinear(build(), OUT, init_std=0.02)
    with torch.no_grad():
        layer.weight.copy_(given.weight)
        layer.norm.weight.copy_(given.gain)
    given = Inputs(*(t.to(dtype) for t in (given.x, given.gain, given.weight, given.dh)))
    for name in ("mxfp8", "mxfp8_e5m2_grad", "fp32"):
        layer.gemms, layer.cast = PRECISIONS[name].filled(CAST), CAST
        layer.zero_grad()
        x = given.x.clone().requires_grad_()
        h = layer(x)
        h.backward(given.dh)
        assert layer.weight.grad.dtype == layer.norm.weight.grad.dtype == torch.float32
        got = [h.detach(), x.grad, layer.norm.weight.grad.to(dtype), layer.weight.grad.to(dtype)]
        for one, other in zip(got, run(given, rms, fold_gain, PRECISIONS[name]), strict=True):
            assert torch.equal(one, other)


@every_module
def test_the_bound_of_the_norm_is_the_tensor_scale_of_nvfp4(build: Callable, rms: Rms, fold_gain: bool) -> None:
    """The tensor scale comes from Lemma 1 or 2, and with an unfolded gain from the bound times the largest gain.

    Observers read the operand.
    """
    given = inputs(torch.float32, spread=1)  # one tensor scale flushes what lies 2^12 below the largest number
    layer = NormLinear(build(), OUT, init_std=0.02)
    nvfp4, layer.cast = linear(PRECISIONS["nvfp4_forward_only"], BlockCast(16)), BlockCast(16)
    layer.gemms = nvfp4.gemms
    with torch.no_grad():
        layer.weight.copy_(given.weight)
        layer.norm.weight.copy_(given.gain)
        xbar, bound = given.x / rms(given.x), torch.tensor(layer.norm.bound)
        x, weight = (xbar, given.weight * given.gain) if fold_gain else (xbar * given.gain, given.weight)
        limit = bound if fold_gain else bound * given.gain.abs().max()
        assert x.abs().max() <= limit
        want = forward_gemm(x, weight, nvfp4, torch.float32, Bounds(limit, limit))
        assert torch.equal(layer(given.x), want)
        assert not torch.equal(layer(given.x), forward_gemm(x, weight, nvfp4, torch.float32))
        seen = quantize(xbar, "NVFP4", tensor_scale=bound / 2688).dequantize()
        torch.testing.assert_close(layer.read(xbar), seen, rtol=1e-6, atol=0)
        assert layer.read(xbar[None]).shape == (1, TOKENS, IN)


@every_module
@every_dtype
def test_norm_alone(build: Callable, rms: Rms, fold_gain: bool, dtype: torch.dtype) -> None:
    """x / rms * gain is computed in FP32 and rounded once to x's dtype, as before a head in high precision."""
    given = inputs(dtype)
    norm = build()
    with torch.no_grad():
        norm.weight.copy_(given.gain)
    got = norm(given.x)
    assert got.dtype == dtype
    assert norm.fold_gain == fold_gain
    want = to_dtype(fp32(normalize(array(given.x), array(rms(given.x))) * array(given.gain)), str(dtype)[6:])
    assert torch.equal(got.double(), torch.tensor(want))


@every_dtype
def test_linear_module(dtype: torch.dtype) -> None:
    given = inputs(dtype)
    layer = MXLinear(IN, OUT, init_std=0.02)
    with torch.no_grad():
        layer.weight.copy_(given.weight)
    mxfp8, layer.cast = linear(PRECISIONS["mxfp8"], BlockCast(16, "floor", "away")), BlockCast(16, "floor", "away")
    layer.gemms = mxfp8.gemms
    h = layer(given.x)
    h.backward(given.dh)
    weight = given.weight.clone().requires_grad_()
    want = mx_linear(given.x, weight, mxfp8)
    want.backward(given.dh)
    assert torch.equal(h, want)
    assert torch.equal(layer.weight.grad.to(dtype), weight.grad)


def test_a_size_that_does_not_fill_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="100"):
        MXNorm(100, p=2.0)
