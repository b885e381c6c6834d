"""Norm, gain and linear in one: forward and gradients against appendix E of the MXNorm paper, written out in float64.

The operands are quantised by the array reference of tests/numerics; each result must lie in the interval that float32
GEMMs and reductions over them leave, and one (bf16: at most two) roundings. The scales of rows and columns are chosen
so that every index of a contraction counts, and a block along the wrong axis underflows.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor

sys.path.insert(0, str(Path(__file__).parents[1] / "numerics"))

from reference import Array, fake_quantize_array, to_dtype

from mxstudy.model import MXLinear, MXNorm, NormLinear, RMSNorm
from mxstudy.numerics import fake_quantize
from mxstudy.numerics.matmul import PRECISIONS, BlockCast, mx_linear
from mxstudy.numerics.norm import norm_linear, rms_estimate, rms_exact
from mxstudy.reader import ConfigError

TOKENS, IN, OUT = 64, 96, 160
EPS = 1e-5
CAST = BlockCast()
UNQUANTISED = PRECISIONS["fp32"]
OPERANDS = [field.name for field in dataclasses.fields(UNQUANTISED)]
NAMES = ("H", "dx", "dgain", "dW")
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # of one rounding, relative

Rms = Callable[[torch.Tensor], torch.Tensor]
RMS: dict[str, Rms] = {
    "exact": lambda x: rms_exact(x, EPS),
    "p1": lambda x: rms_estimate(x, 1.0, 32, EPS),
    "p2": lambda x: rms_estimate(x, 2.0, 32, EPS),
}
every_rms = pytest.mark.parametrize("rms", RMS.values(), ids=RMS)
every_fold = pytest.mark.parametrize("fold_gain", [True, False], ids=["folded", "unfolded"])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    gain: torch.Tensor
    weight: torch.Tensor
    dh: torch.Tensor


def inputs(dtype: torch.dtype, leading: tuple[int, ...] = (TOKENS,), spread: int = 12) -> Inputs:
    """Normals times powers of two that cancel in the contractions over `in` and `out`; gains of both signs around 1."""
    generator = torch.Generator().manual_seed(0)

    def exponents(size: int) -> torch.Tensor:
        return torch.randint(-spread, spread + 1, (size,), generator=generator)

    def draw(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        normal = torch.randn(len(rows), len(columns), generator=generator)
        return torch.ldexp(normal, rows[:, None] + columns).to(dtype)

    token, other_token, into, out = exponents(TOKENS), exponents(TOKENS), exponents(IN), exponents(OUT)
    gain = (1 + 0.6 * torch.randn(IN, generator=generator)).to(dtype)
    x, weight, dh = draw(token // 4, into), draw(out, -into), draw(other_token, -out)
    return Inputs(x.reshape(*leading, IN), gain, weight, dh.reshape(*leading, OUT))


def run(
    given: Inputs, rms: Rms, fold_gain: bool, gemms: object, cast: BlockCast = CAST, call: Callable = norm_linear
) -> list[torch.Tensor]:
    """H, dx, dgain, dW."""
    x, gain, weight = (t.clone().requires_grad_() for t in (given.x, given.gain, given.weight))
    h = call(x, gain, weight, rms=rms, fold_gain=fold_gain, gemms=gemms, cast=cast)
    h.backward(given.dh)
    results = [h.detach(), x.grad, gain.grad, weight.grad]
    for result, like in zip(results, (given.dh, x, gain, weight), strict=True):
        assert result.dtype == given.x.dtype
        assert result.shape == like.shape
    return results


def array(t: torch.Tensor) -> Array:
    return t.detach().double().numpy().reshape(-1, t.shape[-1])


def fp32(x: Array) -> Array:
    return to_dtype(x, "float32")


def normalize(x: Array, r: Array) -> Array:
    """x / rms rounded to float32: operands with the same bits need the same rounding here."""
    return fp32(x / r)


def gemm(a: Array, b: Array) -> tuple[Array, Array]:
    """The product and the error of a float32 GEMM."""
    return a @ b, a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b))


def references(
    given: Inputs, rms: Rms, fold_gain: bool, gemms: object, cast: BlockCast = CAST
) -> list[tuple[Array, Array]]:
    """H, dx, dgain, dW (Eq. 11, 13, 16 to 21) and how far each may be off."""
    dtype = str(given.x.dtype).removeprefix("torch.")
    unit = UNIT[given.x.dtype]
    x, g, W, dH = array(given.x), array(given.gain), array(given.weight), array(given.dh)
    r = array(rms(given.x))
    xbar = normalize(x, r)

    def q(t: Array, operand: str, axis: int) -> Array:
        return fake_quantize_array(t, getattr(gemms, operand), axis, dtype, **dataclasses.asdict(cast))

    forward_x, forward_w = (xbar, fp32(W * g)) if fold_gain else (fp32(xbar * g), W)
    h, h_error = gemm(q(forward_x, "forward_x", 1), q(forward_w, "forward_w", 1).T)
    dz, dz_error = gemm(q(dH, "dgrad_dh", 1), q(W, "dgrad_w", 0))
    dw, dw_error = gemm(q(dH, "wgrad_dh", 0).T, q(forward_x, "wgrad_x", 0))
    if fold_gain:
        dw, dw_error = dw * g, dw_error * np.abs(g) + unit * np.abs(dw * g)
    dz_error = dz_error + unit * np.abs(dz)

    def through_norm(dxbar: Array, sign: int = -1) -> Array:
        return dxbar / r + sign * x * (dxbar * x).mean(-1, keepdims=True) / r**3

    dgain, dx = (xbar * dz).sum(0, keepdims=True), through_norm(dz * g)
    terms = 2.0**-24 * np.abs(dz) * max(TOKENS, IN)  # of the reductions, in float32
    dgain_error = (np.abs(xbar) * (dz_error + terms)).sum(0, keepdims=True)
    x_sign, x = x, np.abs(x)
    dx_error = through_norm((dz_error + terms) * np.abs(g), +1)
    x = x_sign
    exact, error = (h, dx, dgain, dw), (h_error, dx_error, dgain_error, dw_error)
    return [(e, d + 1.01 * unit * (np.abs(e) + d)) for e, d in zip(exact, error, strict=True)]


def fits(got: torch.Tensor, want: tuple[Array, Array]) -> Array:
    exact, error = want
    found = array(got).reshape(exact.shape)
    return np.abs(found - exact) <= error


def assert_fits(got: list[torch.Tensor], want: list[tuple[Array, Array]]) -> None:
    off = {name: float((~fits(a, b)).mean()) for name, a, b in zip(NAMES, got, want, strict=True)}
    assert off == dict.fromkeys(NAMES, 0.0), "share of elements outside of the interval"


# ------------------------------------------------------------------------------------------------- against appendix E


@pytest.mark.parametrize("name", ["fp32", "mxfp8", "mxfp8_e5m2_grad", "mx_mix", "mxfp8_bf16_act", "mxfp8_bf16_weight"])
@every_rms
@every_fold
@every_dtype
@pytest.mark.parametrize("leading", [(TOKENS,), (4, 16)])
def test_gradients(name: str, rms: Rms, fold_gain: bool, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    given = inputs(dtype, leading)
    assert_fits(run(given, rms, fold_gain, PRECISIONS[name]), references(given, rms, fold_gain, PRECISIONS[name]))


@pytest.mark.parametrize("operand", OPERANDS)
@every_rms
@every_fold
@every_dtype
def test_one_operand_quantised(operand: str, rms: Rms, fold_gain: bool, dtype: torch.dtype) -> None:
    """The others stay as they are; what does not read it keeps its bits."""
    given, gemms = inputs(dtype), dataclasses.replace(UNQUANTISED, **{operand: "E4M3"})
    got, plain = run(given, rms, fold_gain, gemms), run(given, rms, fold_gain, UNQUANTISED)
    assert_fits(got, references(given, rms, fold_gain, gemms))
    changed = [name for name, a, b in zip(NAMES, got, plain, strict=True) if not torch.equal(a, b)]
    assert changed == {"forward": ["H"], "dgrad": ["dx", "dgain"], "wgrad": ["dW"]}[operand.split("_")[0]]


@pytest.mark.parametrize("arguments", [(16, "floor", "even"), (16, "even", "away"), (32, "ceil", "away")])
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
    """Folded against unfolded, the fused weight in the backward, the gain inside of the weight gradient's cast."""
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
    """A unit weight hands out the operand: Q(x / rms), from the unrounded quotient; the gain folded or not."""
    given = dataclasses.replace(inputs(dtype), weight=torch.eye(IN, dtype=dtype))
    quotient = torch.tensor(normalize(array(given.x), array(rms(given.x))), dtype=torch.float32)
    gemms = dataclasses.replace(UNQUANTISED, forward_x="E4M3")
    for gain, fold_gain, operand in (
        (torch.ones(IN), True, quotient),
        (torch.ones(IN), False, quotient),
        (given.gain.float(), False, quotient * given.gain.float()),
    ):
        h = norm_linear(given.x, gain.to(dtype), given.weight, rms=rms, fold_gain=fold_gain, gemms=gemms, cast=CAST)
        assert torch.equal(h, fake_quantize(operand, "E4M3").to(dtype))


def test_gain_times_weight_goes_unrounded_into_the_cast() -> None:
    """In bf16 too: the product is not rounded to bf16 before it is quantised."""
    given = inputs(torch.bfloat16)
    x = torch.eye(IN, dtype=torch.bfloat16)
    gemms = dataclasses.replace(UNQUANTISED, forward_w="E4M3")
    ones: Rms = lambda x: torch.ones(len(x), 1)  # noqa: E731
    h = norm_linear(x, given.gain, given.weight, rms=ones, fold_gain=True, gemms=gemms, cast=CAST)
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


@pytest.mark.parametrize("frozen", ["x", "gain", "weight"])
@every_fold
def test_only_some_gradients_are_wanted(frozen: str, fold_gain: bool) -> None:
    given = inputs(torch.float32)
    want = dict(zip(("x", "gain", "weight"), run(given, RMS["p2"], fold_gain, PRECISIONS["mxfp8"])[1:], strict=True))
    leaves = {name: getattr(given, name).clone().requires_grad_(name != frozen) for name in want}
    h = norm_linear(**leaves, rms=RMS["p2"], fold_gain=fold_gain, gemms=PRECISIONS["mxfp8"], cast=CAST)
    h.backward(given.dh)
    for name, leaf in leaves.items():
        assert leaf.grad is None if name == frozen else torch.equal(leaf.grad, want[name])


@pytest.mark.parametrize("operand", ["wgrad_dh", "wgrad_x"])
@every_fold
def test_tokens_that_do_not_fill_blocks_are_refused(operand: str, fold_gain: bool) -> None:
    given = inputs(torch.float32)
    given.x, given.dh = given.x[:40], given.dh[:40]
    with pytest.raises(ConfigError, match="40"):
        run(given, RMS["p2"], fold_gain, dataclasses.replace(UNQUANTISED, **{operand: "E4M3"}))
    forward_only = PRECISIONS["mxfp8_forward_only"]
    assert_fits(run(given, RMS["p2"], fold_gain, forward_only), references(given, RMS["p2"], fold_gain, forward_only))


@pytest.mark.slow
@every_fold
@every_dtype
def test_compiled(fold_gain: bool, dtype: torch.dtype) -> None:
    """With the divisor given, the compiled operands have the same bits, so the same references hold.

    Without `emulate_precision_casts`, which the training runtime sets too, Inductor drops roundings to bf16.
    """
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
}
every_module = pytest.mark.parametrize(("build", "rms", "fold_gain"), MODULES.values(), ids=MODULES)


@every_module
@every_dtype
def test_norm_linear_module(build: Callable, rms: Rms, fold_gain: bool, dtype: torch.dtype) -> None:
    """Parameters in FP32, cast to x's dtype first; the precision is what the module was given."""
    given = inputs(torch.float32)
    layer = NormLinear(build(), OUT, init_std=0.02)
    with torch.no_grad():
        layer.weight.copy_(given.weight)
        layer.norm.weight.copy_(given.gain)
    given = Inputs(*(getattr(given, field.name).to(dtype) for field in dataclasses.fields(given)))
    for name in ("mxfp8", "mxfp8_e5m2_grad", "fp32"):
        layer.gemms, layer.cast = PRECISIONS[name], CAST
        layer.zero_grad()
        x = given.x.clone().requires_grad_()
        h = layer(x)
        h.backward(given.dh)
        assert layer.weight.grad.dtype == layer.norm.weight.grad.dtype == torch.float32
        got = [h.detach(), x.grad, layer.norm.weight.grad.to(dtype), layer.weight.grad.to(dtype)]
        for one, other in zip(got, run(given, rms, fold_gain, PRECISIONS[name]), strict=True):
            assert torch.equal(one, other)


@every_module
@every_dtype
def test_norm_alone(build: Callable, rms: Rms, fold_gain: bool, dtype: torch.dtype) -> None:
    """x / rms * gain in FP32, rounded once to x's dtype, as before a head in high precision."""
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
    layer.gemms, layer.cast = PRECISIONS["mxfp8"], BlockCast(16, "floor", "away")
    h = layer(given.x)
    h.backward(given.dh)
    weight = given.weight.clone().requires_grad_()
    want = mx_linear(given.x, weight, PRECISIONS["mxfp8"], BlockCast(16, "floor", "away"))
    want.backward(given.dh)
    assert torch.equal(h, want)
    assert torch.equal(layer.weight.grad.to(dtype), weight.grad)


def test_a_size_that_does_not_fill_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="100"):
        MXNorm(100, p=2.0)
