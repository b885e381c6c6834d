"""`saturation` of an operand agrees with numpy, with numbers known beforehand, and with a Gaussian's."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from each import each
from reference import dequantize_array, quantize_array

from mxstudy import config
from mxstudy.config import BlockCast, Cast, Gemms
from mxstudy.config.recipes import tensor_scaled
from mxstudy.model import MXLinear
from mxstudy.model.linear import Sources
from mxstudy.numerics.gemms import quantized_operand
from mxstudy.probes.base import StepView, Values
from mxstudy.probes.saturation import (
    QUANTISED_FROM,
    Saturation,
    gaussian_quality,
    quality,
    quantized_operands,
    scale_exponents,
)
from mxstudy.probes.shadow import capture_linears
from mxstudy.train.loop import TrainingRun, train_step

LINEARS = ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2")
QUALITIES = ("overflow_fraction", "max_fraction", "underflow_fraction", "sqnr_db")
EXPONENTS = tuple(f"scale_exponent_{which}" for which in ("mean", "min", "max"))


def measured(settings: config.Pretrain) -> tuple[TrainingRun, StepView, Values]:
    run, _ = tiny.build(settings)
    view = train_step(run, 0)
    return run, view, Saturation(config.Saturation(every_steps=1)).measure(view)


def e4m3(**settings: Any) -> Cast:
    return Cast(format="E4M3").filled(BlockCast(**settings))


def settings_of(row: str, norm: config.Norm = tiny.MXNORM, **precision: object) -> config.Pretrain:
    return replace(tiny.CONFIG, norm=norm, precision=replace(tiny.precision((0, row)), **precision))


def test_output_gradients_are_those_of_a_step_of_several_sequences() -> None:
    run, _ = tiny.build(replace(settings_of("mxfp8", backend="reference"), optimizer=config.AdamW(lr=1e-12)))
    assert run.config.train.batch_size > 1
    seen: list[torch.Tensor] = []
    module = run.model.layers[1].feed_forward.w2
    hook = module.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    view = train_step(run, 0)
    hook.remove()
    captured = capture_linears(run.model, view.first_sequence(), view.tokens)["layers.1.feed_forward.w2"]
    assert torch.equal(captured.dh_TO, seen[0][0])


@each(("row", "operands"), [("mxfp8", 6), ("mxfp8_bf16_weight", 4), ("bf16", 0)])
def test_every_quantised_operand_has_every_quantity(row: str, operands: int) -> None:
    _, _, values = measured(settings_of(row))
    seen = Counter(key.rsplit("/", 2)[0] for key in values)
    linears = [f"layers.{i}.{name}" for i in (0, 1) for name in LINEARS if operands]
    assert seen == dict.fromkeys(linears, operands * (2 * len(QUALITIES) + len(EXPONENTS)))
    quantities = {*QUALITIES, *EXPONENTS, *(f"{quantity}_gaussian" for quantity in QUALITIES)}
    assert {key.rsplit("/", 1)[1] for key in values} == (quantities if operands else set())
    assert all(math.isfinite(value) for value in values.values())


def test_what_the_backward_takes_of_the_forward_is_measured_as_that() -> None:
    """An operand that the backward takes from the forward is compared with what the forward multiplies.

    It is not compared with the high-precision tensor.
    """
    of_forward = replace(e4m3(), source="forward")
    linear = MXLinear(64, 96, 0.02)
    linear.gemms = Gemms(
        forward_x=Cast(format="E2M1").filled(BlockCast()),
        forward_w=Cast(format="E2M1").filled(BlockCast()),
        dgrad_w=of_forward,
        wgrad_x=of_forward,
    )
    x, weight, dh = (torch.randn(shape) for shape in ((32, 64), (96, 64), (32, 96)))
    found = {
        name: (quantized, of)
        for name, quantized, of in quantized_operands(Sources(x, weight, weight, None, linear.arithmetic), dh)
    }
    for name, forward in (("dgrad_w", "forward_w"), ("wgrad_x", "forward_x")):
        quantized, of = found[name]
        assert torch.equal(of, found[forward][0].dequantize())
        assert torch.equal(quantized.values, quantized_operand(of, of_forward, -2).values)


@pytest.mark.integration
@pytest.mark.parametrize("norm", [tiny.MXNORM, tiny.RMSNORM], ids=["folded", "unfolded"])
@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_quantities_are_those_of_numpy(rule: str, norm: config.Norm) -> None:
    run, view, values = measured(settings_of("mxfp8_e5m2_grad", norm, scale_rule=rule, rounding="away"))
    for name, captured in capture_linears(run.model, view.first_sequence(), view.tokens).items():
        for operand, (source, axis) in QUANTISED_FROM.items():
            of = captured.dh_TO if source == "dh_TO" else getattr(captured.sources(), source)
            x = of.double().numpy()
            fmt, top = ("E5M2", 57344) if operand.endswith("dh") else ("E4M3", 448)
            elements, codes = quantize_array(x, fmt, 32, axis, rule, "away")
            exponents = codes.astype(int) - 127
            scale = np.ldexp(1.0, np.repeat(exponents, 32, axis))
            noise = dequantize_array(elements, codes, axis) - x
            exponents = exponents[codes > 0]  # the others belong to zeros
            expected = {
                "overflow_fraction": (abs(x) > top * scale).mean(),
                "max_fraction": (abs(elements) == top).mean(),
                "underflow_fraction": ((elements == 0) & (x != 0)).mean(),
                "sqnr_db": 10 * np.log10((x**2).sum() / (noise**2).sum()),
                "scale_exponent_mean": exponents.mean(),
                "scale_exponent_min": exponents.min(),
                "scale_exponent_max": exponents.max(),
            }
            got = {quantity: values[f"{name}/{operand}/{quantity}"] for quantity in expected}
            assert got == pytest.approx(expected, rel=1e-12), (name, operand)


def test_a_made_up_layer() -> None:
    """With floor and E4M3, a block of absmax 1.76 has the scale 2^-8, so that it ends at 1.75 and 2^-17."""
    row = torch.zeros(32)
    row[:5] = torch.tensor([1.76, -1.751, 1.75, 1.7, 2.0**-19])
    x = torch.stack((row, torch.zeros(32)))
    linear = MXLinear(32, 32, 1.0)
    cast = e4m3(scale_rule="floor")
    linear.gemms = Gemms(forward_x=cast)
    [(operand, quantized, source)] = quantized_operands(
        Sources(x, linear.weight, linear.weight, None, linear.arithmetic), x
    )
    assert operand == "forward_x"
    assert source is x
    measured = quality(quantized, x, cast) | scale_exponents(quantized)
    got = {name: value.item() for name, value in measured.items()}
    noise = 0.01**2 + 0.001**2 + (1.7 - 1.75) ** 2 + 2.0**-38  # 1.7 is 435 of scale 2^-8: nearer to 448 than to 416
    signal = sum(v * v for v in (1.76, 1.751, 1.75, 1.7, 2.0**-19))
    assert got == {
        "overflow_fraction": 2 / 64,
        "max_fraction": 4 / 64,
        "underflow_fraction": 1 / 64,
        "sqnr_db": pytest.approx(10 * math.log10(signal / noise), abs=1e-3),
        "scale_exponent_mean": -8,  # the block of zeros does not count
        "scale_exponent_min": -8,
        "scale_exponent_max": -8,
    }
    pre_rounding = replace(cast, pre_round=True)  # -1.751 is 1.75 in bf16, where the block ends
    assert quality(quantized_operand(x, pre_rounding, 1), x, pre_rounding)["overflow_fraction"] == 1 / 64


def test_one_scale_a_tensor() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    cast = tensor_scaled("E4M3").filled(BlockCast())
    quantized = quantized_operand(x, cast, 0)
    scale = x.abs().max().item() / 448
    exponents = scale_exponents(quantized)
    assert {value.item() for value in exponents.values()} == {math.floor(math.log2(scale))}
    assert quality(quantized, x, cast)["overflow_fraction"] == 0
    assert quality(quantized, x, cast)["max_fraction"].item() == (x.abs() >= 432 * scale).double().mean().item()
    torch.testing.assert_close(quantized.dequantize(), quantized.values * scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("row", "block_size"), [("nvfp4_forward_only", 16), ("fp8_tensor", 32)])
def test_formats_with_other_scales_are_measured_too(row: str, block_size: int) -> None:
    _, _, values = measured(settings_of(row, block_size=block_size))
    floor_db = {"nvfp4_forward_only": 15, "fp8_tensor": 25}[row]
    assert all(math.isfinite(value) for value in values.values())
    assert min(value for key, value in values.items() if key.endswith("sqnr_db")) > floor_db


@each(("chain", "share"), [("inference", 0.0), ("training", 0.5)])
def test_scales_below_the_least_normal_are_counted_of_e4m3_scales_alone(chain: str, share: float) -> None:
    """One block holds the absmax. The other is 2^-16 of it, so that its scale would be 448 * 2^-16 < 2^-6."""
    x = torch.cat((torch.ones(1, 16), torch.full((1, 16), 2.0**-16)), 1)
    cast = Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", chain=chain).filled(BlockCast(16))
    assert quality(quantized_operand(x, cast, 1), x, cast)["subnormal_scale_fraction"] == share
    assert "subnormal_scale_fraction" not in quality(quantized_operand(x, e4m3(), 1), x, e4m3())


def test_a_nan_shows() -> None:
    x = torch.ones(2, 32)
    x[0, 0] = torch.nan
    exponents = scale_exponents(quantized_operand(x, e4m3(), 1))
    assert all(value.isnan() for value in exponents.values())


# Measured on a Gaussian elsewhere, in blocks of 32 under floor (the public code of the instability paper).
@pytest.mark.parametrize(("quantity", "expected"), [("overflow_fraction", 0.0086), ("max_fraction", 0.0115)])
def test_a_gaussian_has_its_last_bin(quantity: str, expected: float) -> None:
    got = gaussian_quality(e4m3(scale_rule="floor"))
    assert got[quantity] == pytest.approx(expected, abs=2e-4)


@each("block_size", [24, 48, 96])
def test_a_gaussian_has_whole_blocks_of_any_size(block_size: int) -> None:
    usual, own = (gaussian_quality(e4m3(block_size=size)) for size in (32, block_size))
    assert own["sqnr_db"] == pytest.approx(usual["sqnr_db"], abs=1.0)


@each(("headroom", "noise"), [(1.0, 0.0188), (16 / 17, 0.0236)])
def test_a_gaussian_is_rounded_as_the_operand_is(headroom: float, noise: float) -> None:
    """NVFP4's stochastic rounding has twice the noise of rounding to nearest (computed elsewhere, on N(0, 1))."""
    cast = Cast(format="NVFP4", scale="E4M3", outer_scale="tensor", rounding="stochastic", headroom=headroom)
    got = gaussian_quality(cast.filled(BlockCast(16)))
    assert got["sqnr_db"] == pytest.approx(-10 * math.log10(noise), abs=0.05)


def test_the_gaussian_stands_beside_and_is_that_of_the_cast() -> None:
    _, _, values = measured(settings_of("mxfp8_e5m2_grad", scale_rule="floor"))
    for operand in QUANTISED_FROM:
        fmt = "E5M2" if operand.endswith("dh") else "E4M3"
        expected = gaussian_quality(Cast(format=fmt).filled(BlockCast(scale_rule="floor")))
        for quantity in QUALITIES:
            assert values[f"layers.0.attention.wo/{operand}/{quantity}_gaussian"] == expected[quantity]


def test_the_gaussian_takes_nothing_from_the_global_generator() -> None:
    gaussian_quality.cache_clear()
    before = torch.get_rng_state()
    gaussian_quality(Cast(format="E2M1").filled(BlockCast()))
    assert torch.equal(torch.get_rng_state(), before)


def test_square_blocks_that_divide_no_1024_rows_are_measured_as_well() -> None:
    wide, usual = (gaussian_quality(replace(e4m3(block_size=size), two_dimensional=True)) for size in (48, 32))
    assert wide["sqnr_db"] == pytest.approx(usual["sqnr_db"], abs=0.5)
