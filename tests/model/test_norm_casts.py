"""MXNorm works with every published recipe: blocks, transforms, bounds, refusals, and the weight that dgrad reads."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from each import each
from precision_files import FILES
from precision_files import of_file as composed
from reference_mxnorm import rms_estimate_array
from torch import Tensor

from mxstudy import config
from mxstudy.config.casts import BlockCast, Cast, Gemms, Hadamard
from mxstudy.data.distributions import laplace
from mxstudy.model import Decoder, LayerNorm, MXNorm, NormLinear, RMSNorm
from mxstudy.model.describe_precision import describe, has_same_codes_of_w
from mxstudy.model.fusable import linears_in
from mxstudy.model.precision import apply_precision
from mxstudy.numerics.gemms import Bounds, Linear
from mxstudy.numerics.norm_linear import norm_linear
from mxstudy.numerics.quality import subnormal_scale_fraction
from mxstudy.probes.saturation import quantized_operands
from mxstudy.reader import ConfigError

MODEL = config.Decoder(hidden_size=128, ffn_size=128, num_layers=2, num_heads=4, num_kv_heads=4, vocab_size=32)
MXNORM = config.MXNorm(p=2.0)
FOLDED = config.RMSNorm(fold_gain=True)
SIZE = 256
H16 = Hadamard(size=16)
of_file = functools.cache(composed)


def applied(precision: config.Precision, norm: config.Norm = MXNORM, model: config.Decoder = MODEL) -> Decoder:
    decoder = Decoder(model, norm, precision.settings, torch.bfloat16)
    decoder.init_weights(0)
    apply_precision(decoder, precision, 0, "bf16", torch.device("cpu"))
    return decoder


def wqkv(precision: config.Precision, norm: config.Norm = MXNORM) -> NormLinear:
    """Return the first block's wqkv, with gains that are not 1."""
    linear = applied(precision, norm).layers[0].attention.wqkv
    with torch.no_grad():
        linear.norm.weight.copy_(1 + 0.3 * normals(1, linear.in_features)[0])
    return linear


def of_row(row: str, **settings: Any) -> config.Precision:
    return config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": row}),), **settings)


def normals(rows: int, size: int = SIZE, seed: int = 0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


# -------------------------------------------------------------------------------------------------- whose blocks


BLOCKS = {
    "nvfp4": 16,
    "nvfp4_four_over_six": 16,
    "fp8_blockwise": 128,
    "mxfp4_h16": 32,
    "mxfp4_h16_random": 32,
    "mxfp4_h16_wgrad": 32,
    "mxfp8_weight_2d": 32,
    "mxfp8_sr_rht_2d": 32,
    "mxfp4_rht_sr": 32,
    "mxfp4_parts": 32,
    "nvfp4_parts": 16,
}


@pytest.mark.integration
@each("name", [name for name in FILES if name != "quartet"])
def test_the_blocks_are_those_of_the_cast(name: str) -> None:
    precision = of_file(name)
    linear = wqkv(precision)
    assert linear.norm.block_size == BLOCKS[name]
    assert linear.norm.transform == precision.recipe(name).forward_transform
    x = normals(4, 128)
    estimated = linear.rms(x.bfloat16())
    if linear.norm.transform is None:
        want = rms_estimate_array(x.bfloat16().double().numpy(), 2.0, BLOCKS[name], 1e-5)
        np.testing.assert_allclose(estimated, want, rtol=1e-6)
    said = describe(applied(precision), {f"layers.{i}.attention.wqkv": name for i in (0, 1)})
    whose = "their own" if linear.gemms.forward_x is None else "those of X's cast"
    assert f"MXNorms take the absmax of blocks of {BLOCKS[name]}, {whose}" in said


def test_without_a_cast_the_blocks_are_the_settings() -> None:
    for row in ("bf16", "fp8_tensor"):
        assert wqkv(of_row(row, block_size=16)).norm.block_size == 16
    with pytest.raises(ConfigError, match=r"precision\.block_size: 64 is set, and every operand fixes its own"):
        applied(replace(of_file("fp8_blockwise"), block_size=64))


REFUSED = {
    "quartet": ({"forward_x": {"statistic": "std", "scale_rule": "floor"}}, "exact RMS as cheaply; use rmsnorm"),
    "squares": ({"forward_x": {"two_dimensional": True, "block_size": 16}}, "blocks that span several tokens"),
}


@each("name", REFUSED)
def test_a_cast_without_the_absmax_of_blocks_of_a_row_is_refused(name: str) -> None:
    fields, message = REFUSED[name]
    own = Gemms(forward_x=Cast(format="E2M1", **fields["forward_x"]), forward_w=Cast(format="E2M1"))
    with pytest.raises(ConfigError, match=f"layers.0.attention.wqkv casts its output .*{message}") as error:
        applied(of_row("own", recipes={"own": own}))
    assert "\n" not in str(error.value)
    applied(of_row("own", recipes={"own": own}), config.RMSNorm())


def test_experts_and_shared_experts_take_one_absmax() -> None:
    mixture = replace(MODEL, mlp="moe", moe=config.MoE(num_experts=2, num_shared=1))
    other = Gemms(forward_x=Cast(format="E2M1", block_size=16), forward_w=Cast(format="E2M1", block_size=16))
    plan = {"layers.*": "mxfp4", "*.shared.*": "other"}
    precision = config.Precision(schedule=(config.PrecisionRow(plan=plan),), recipes={"other": other})
    with pytest.raises(ConfigError, match="reads the experts' norm but casts it in other blocks"):
        applied(precision, model=mixture)
    applied(of_row("mxfp4"), model=mixture)
    with pytest.raises(
        ConfigError, match=r"layers\.0\.feed_forward\.shared.* under another transform.* without random signs"
    ):
        applied(of_file("mxfp4_h16_random"), model=mixture)
    applied(of_file("mxfp4_h16"), model=mixture)
    with pytest.raises(ConfigError, match=r"norm\.fold_gain_in_dgrad: .* reads a norm together with others"):
        applied(of_row("mxfp4"), replace(MXNORM, fold_gain_in_dgrad=True), model=mixture)


# ------------------------------------------------------------------------------------------------ under a transform


def matrix(size: int) -> np.ndarray:
    """Return Sylvester's matrix, orthonormal, in float64."""
    bits = np.arange(size)
    parity = np.vectorize(lambda n: bin(n).count("1") % 2)(bits[:, None] & bits[None])
    return (1.0 - 2.0 * parity) / size**0.5


def rotated(x: Tensor, size: int) -> np.ndarray:
    return (x.double().numpy().reshape(-1, size) @ matrix(size)).reshape(x.shape)


def layer(norm: Any, transform: Hadamard | None = None, **cast: Any) -> NormLinear:
    linear = NormLinear(norm, 64, 0.02)
    forward_x = Cast(format="E2M1", block_size=16, scale="E4M3", outer_scale="bound", **cast)
    linear.gemms = Gemms(forward_x=forward_x, forward_transform=transform).filled(BlockCast())
    if isinstance(norm, MXNorm):
        norm.take_blocks(16, transform)
    with torch.no_grad():
        linear.weight.copy_(normals(64, norm.size))
        norm.weight.fill_(1.0)
    return linear


@each("size", [16, 64])
@each("p", [1.0, 2.0])
def test_under_a_transform_the_estimate_is_of_what_the_cast_gets(size: int, p: float) -> None:
    """The transform keeps the RMS, so both estimate the same number.

    For Laplace rows the estimate is nearer to it, because sums are nearer to a Gaussian.
    """
    x = laplace((64, 1024), torch.Generator().manual_seed(1))
    linear, plain = (layer(MXNorm(1024, p, 16, eps=0.0), t) for t in (Hadamard(size=size), None))
    np.testing.assert_allclose(linear.rms(x), rms_estimate_array(rotated(x, size), p, 16, 0.0), rtol=2e-6)
    exact = x.double().square().mean(-1, keepdim=True).sqrt()
    np.testing.assert_allclose(np.sqrt((rotated(x, size) ** 2).mean(-1, keepdims=True)), exact, rtol=1e-6)
    off, plain_off = (float((one.rms(x) / exact).mean() - 1) for one in (linear, plain))
    assert abs(off) < 0.4 * plain_off
    assert plain_off > 0.1
    assert torch.equal(layer(RMSNorm(1024), Hadamard(size=size)).rms(x), RMSNorm(1024).rms(x))


def spikes(size: int, largest: float) -> Tensor:
    """Return rows with a lone spike in the first, a middle and the last block."""
    x = torch.zeros(3, size)
    x[0, 0], x[1, size // 2 + 5], x[2, -1] = largest, -largest, largest
    return x


NORMS = {"rmsnorm": RMSNorm(SIZE, 0.0), "p1": MXNorm(SIZE, 1.0, 16, 0.0), "p2": MXNorm(SIZE, 2.0, 16, 0.0)}


@each("name", NORMS)
@each("transform", [None, H16])
@each("chain", ["inference", "training"])
@each("largest", [1e-12, 1.0, 1e15])
def test_bounds_are_reached_and_nothing_overflows(name: str, transform: Any, chain: str, largest: float) -> None:
    """Lemma 1's bound survives the transform. Lemma 2's holds after the transform, and 4 = sqrt(16) times it before.

    Lemma 1's worst case is a lone spike after the transform, and Lemma 2's a lone spike before it.
    """
    norm = NORMS[name]
    linear = layer(norm, transform, chain=chain)
    bounds, turn = linear.bounds, (lambda x: torch.tensor(rotated(x, 16)).float()) if transform else (lambda x: x)
    grows = 4 if transform and name != "rmsnorm" else 1
    assert (bounds.forward, bounds.plain) == (norm.bound, norm.bound * grows)
    spike = spikes(SIZE, largest)
    before, after = linear.normalize(spike), turn(linear.normalize(turn(spike)))
    np.testing.assert_allclose(before.abs().amax(-1), np.full(3, bounds.plain), rtol=1e-5)
    np.testing.assert_allclose(after.abs().amax(-1), np.full(3, bounds.forward), rtol=1e-5)
    read, given = linear.arithmetic, Bounds(torch.tensor(bounds.forward), torch.tensor(bounds.plain))
    for x in (spike, turn(spike), normals(32) * largest, (normals(32) ** 9) * largest):
        xbar = linear.normalize(x)
        assert xbar.abs().max() <= bounds.plain * (1 + 1e-5)
        assert turn(xbar).abs().max() <= bounds.forward * (1 + 1e-5)
        quantized = read.forward_cast(xbar, "forward_x", given)
        assert quantized.scales.float().max() <= 448
        assert quantized.dequantize().isfinite().all()
        assert quantized.dequantize().abs().max() <= bounds.forward * (1 + 2.0**-7)  # bf16 before the cast
        assert linear(x).isfinite().all()
    top = read.forward_cast(linear.normalize(turn(spike)), "forward_x", given).scales.float().amax()
    assert top == 448


def test_layer_norm_under_a_transform_is_bounded_by_its_length() -> None:
    """LayerNorm under a transform is bounded by sqrt(D), and reaches it.

    Its elements sum to 0, which gives sqrt(D - 1), but those of a transformed tile do not.
    """
    linear = layer(LayerNorm(SIZE, 0.0, bias=True), H16)
    assert linear.bounds.forward == SIZE**0.5 > linear.bounds.plain
    tile = torch.zeros(1, SIZE)
    tile[0, :16] = torch.tensor(matrix(16)[1]).float()  # its sum is 0
    assert abs(rotated(linear.normalize(tile), 16)).max() == pytest.approx(SIZE**0.5, rel=1e-6)
    with torch.no_grad():
        linear.norm.bias.fill_(3.0)
    found = linear.sources(normals(4)).bounds
    assert found is not None
    assert float(found.forward) == pytest.approx(SIZE**0.5 + 3 * 4, rel=1e-6)
    assert float(found.plain) == pytest.approx((SIZE - 1) ** 0.5 + 3, rel=1e-6)


def test_the_looser_the_bound_the_more_scales_are_subnormal() -> None:
    """E4M3's least normal is 2^-6. Blocks that a bound leaves below it lose bits of their scale, and then all."""
    linear = layer(MXNorm(4096, 1.0, 16), chain="training")
    quiet = normals(8, 4096) * torch.logspace(0, -5, 256).repeat_interleave(16)
    cast = linear.gemms.forward_x
    assert cast is not None
    shares = []
    for outer in ("tensor", "bound"):
        linear.gemms = replace(linear.gemms, forward_x=replace(cast, outer_scale=outer))
        found = linear.sources(quiet)
        quantized = found.linear.forward_cast(found.x_TI, "forward_x", found.bounds)
        shares.append(subnormal_scale_fraction(quantized, found.x_TI).item())
    scales = (normals(8, 4096) * torch.logspace(0, -5, 256).repeat_interleave(16)).unflatten(-1, (-1, 16))
    rms = linear.rms(quiet)
    below = scales.abs().amax(-1) / rms / 6 / (linear.norm.bound / 2688) < 2.0**-6 * (1 - 2.0**-5)
    assert 0 < shares[0] < shares[1] == pytest.approx(below.double().mean().item(), abs=0.01)


# -------------------------------------------------------------------------- W in the forward and in dgrad: the arms


ARMS = {
    "rmsnorm": (config.RMSNorm(), True),
    "rmsnorm folded": (FOLDED, False),
    "rmsnorm folded, dgrad too": (replace(FOLDED, fold_gain_in_dgrad=True), True),
    "mxnorm, dgrad from Q(W)": (MXNORM, False),
    "mxnorm, dgrad from Q(W * gain)": (replace(MXNORM, fold_gain_in_dgrad=True), True),
}


@pytest.mark.integration
@each("arm", ARMS)
@each("name", ["nvfp4", "nvfp4_four_over_six", "mxfp8_weight_2d", "fp8_blockwise"])
def test_codes_are_consistent_where_it_is_claimed(name: str, arm: str) -> None:
    """Forward and dgrad quantise one tensor in the same squares: scales and elements have equal bits."""
    norm, consistent = ARMS[arm]
    linear = wqkv(of_file(name), norm)
    found = {operand: q for operand, q, _ in quantized_operands(linear.sources(normals(32, 128)), normals(32, 384))}
    forward, dgrad = found["forward_w"], found["dgrad_w"]
    assert torch.equal(forward.values, dgrad.values) == consistent
    assert has_same_codes_of_w(linear) == consistent
    if consistent:
        assert_same_bits(forward.scales.float(), dgrad.scales.float())
    assert has_same_codes_of_w(applied(of_file(name), norm).layers[0].attention.wo)


@pytest.mark.integration
def test_codes_of_blocks_along_one_axis_are_no_claim() -> None:
    for word in ("precision.recipes.nvfp4.forward_w.two_dimensional=false", "precision.recipes.nvfp4.dgrad_w=null"):
        assert not has_same_codes_of_w(wqkv(of_file("nvfp4", word), config.RMSNorm()))
    assert not has_same_codes_of_w(wqkv(of_row("mxfp8"), config.RMSNorm()))
    assert has_same_codes_of_w(wqkv(of_row("fp8_tensor"), config.RMSNorm()))
    said = describe(
        model := applied(of_file("nvfp4")),
        {n: "nvfp4" for n, m in model.named_modules() if m in linears_in(model.layers[0])},
    )
    assert "nvfp4: forward and dgrad multiply with the same codes of W in 2 of 4" in said


@each("norm", ["rmsnorm", "mxnorm"])
def test_gradients_with_the_gain_folded_into_dgrad(norm: str) -> None:
    """Without casts the gradients are those of dgrad from W.

    With casts they are those of W * gain, whose gradient splits into two.
    """
    built: dict[str, Any] = {"rmsnorm": RMSNorm(128, fold_gain=True), "mxnorm": MXNorm(128, 2.0)}
    rms, x, dh = built[norm].rms, normals(32, 128), normals(32, 64, seed=1)
    weight, gain = normals(64, 128, seed=2), 1 + 0.3 * normals(1, 128, seed=3)[0]
    mxfp4 = config.PRECISIONS["mxfp4"].filled(BlockCast())

    def gradients(gemms: Gemms, gain: Tensor, weight: Tensor, in_dgrad: bool) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (x, gain, weight)]
        options = {"bounds": built[norm].bounds(1), "fold_gain": True, "fold_gain_in_dgrad": in_dgrad}
        h = norm_linear(*leaves, rms=rms, linear=Linear(gemms), **options)
        return torch.autograd.grad(h, leaves, dh)

    exact = (gradients(Gemms(), gain, weight, in_dgrad) for in_dgrad in (True, False))
    for got, want in zip(*exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    dx, dgain, dweight = gradients(mxfp4, gain, weight, True)
    want_dx, _, dfolded = gradients(mxfp4, torch.ones(128), weight * gain, False)
    assert_same_bits(dx, want_dx)
    assert_same_bits(dweight, dfolded * gain)
    torch.testing.assert_close(dgain, (dfolded * weight).sum(0), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(dx, gradients(mxfp4, gain, weight, False)[0], rtol=1e-2)


def test_what_folds_into_dgrad_folds_into_the_forward_and_has_no_kernel() -> None:
    with pytest.raises(ConfigError, match="fold_gain_in_dgrad: the forward does not fold the gain"):
        config.RMSNorm(fold_gain_in_dgrad=True)
    for norm, precision, why in (
        (replace(MXNORM, fold_gain_in_dgrad=True), of_row("mxfp8"), "its dgrad takes the gain too"),
        (MXNORM, of_file("mxfp4_h16"), "takes the absmax of blocks under the forward's transform"),
    ):
        backend = applied(precision, norm).layers[0].backend
        assert backend.name == "reference"
        assert why in backend.why
    assert applied(of_file("mxfp4_h16"), config.RMSNorm()).layers[0].backend.name == "fused"


def test_quartet_takes_a_folded_gain_if_dgrad_does() -> None:
    with pytest.raises(ConfigError, match=r"norm\.fold_gain_in_dgrad=true"):
        applied(of_file("quartet"), FOLDED)
    applied(of_file("quartet"), replace(FOLDED, fold_gain_in_dgrad=True))
    with pytest.raises(ConfigError, match="exact RMS as cheaply; use rmsnorm"):
        applied(of_file("quartet"))
