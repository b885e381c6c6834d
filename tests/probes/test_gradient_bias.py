"""Gradients agree with numpy's arithmetic, and there is no bias where there should be none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from each import each

from mxstudy import config
from mxstudy.config import Gemms
from mxstudy.model.decoder import Decoder
from mxstudy.model.linear import NormLinear
from mxstudy.model.precision import evaluated
from mxstudy.model.random_streams import move_to
from mxstudy.probes.base import StepView, Values
from mxstudy.probes.gradient_bias import GradientBias, compare, squared_norms
from mxstudy.probes.shadow import borrowed, shadow_gradients
from mxstudy.train.loop import TrainingRun, train_step

ESTIMATED = [tiny.MXNORM, config.PostRoundMXNorm()]
QUANTITIES = ("ratio", "squared_ratio", "cosine", "norm_ratio")


def measured(row: str, norm: config.Norm = tiny.MXNORM, **changes: Any) -> tuple[TrainingRun, StepView, Values]:
    run, _ = tiny.build(replace(tiny.CONFIG, norm=norm, precision=tiny.precision((0, row))), **changes)
    view = train_step(run, 0)
    return run, view, GradientBias(config.GradientBias(every_steps=1)).measure(view)


def named(prefix: str, quantity: str, values: Values) -> list[Any]:
    return [value for key, value in values.items() if key.startswith(prefix) and key.endswith(f"/{quantity}")]


@each("norm", [tiny.MXNORM, tiny.RMSNORM, config.LayerNorm(bias=True)])
def test_fp32_against_fp32_has_no_bias(norm: config.Norm) -> None:
    _, _, values = measured("fp32", norm, compute="fp32")
    assert {*named("", "ratio", values)} == {*named("", "squared_ratio", values)} == {0.0}
    assert named("", "cosine", values) == pytest.approx([1.0] * len(named("", "cosine", values)), abs=1e-15)
    assert {*named("", "norm_ratio", values)} == {1.0}
    assert values["model/loss_difference_nats"] == 0


def test_coarser_formats_have_more_of_it() -> None:
    ratios = [measured(row)[2]["model/ratio"] for row in ("bf16", "mxfp8", "mxfp4")]
    assert 0 < 1.5 * ratios[0] < ratios[1] < ratios[2] / 2


def test_values_are_those_of_numpy() -> None:
    run, view, values = measured("mxfp8_e5m2_grad")
    loss, gradients = shadow_gradients(run.model, view.first_sequence())
    true_loss, true_gradients = shadow_gradients(run.model, view.first_sequence(), Gemms(), torch.float32)
    pairs = {
        name: (g.double().numpy().ravel(), true_gradients[name].double().numpy().ravel())
        for name, g in gradients.items()
    }
    g, h = zip(*pairs.values(), strict=True)
    pairs["model"] = np.concatenate(g), np.concatenate(h)
    expected: dict[str, float] = {}
    for name, (g, h) in pairs.items():
        own, true, difference = np.linalg.norm(g), np.linalg.norm(h), np.linalg.norm(g - h)
        quantities = (difference / true, (difference / true) ** 2, g @ h / own / true, own / true)
        expected |= dict(zip([f"{name}/{quantity}" for quantity in QUANTITIES], quantities, strict=True))
    assert values.pop("model/cost_ms") > 0
    assert values.pop("model/loss_difference_nats") == (loss - true_loss).item() != 0
    assert values == pytest.approx(expected, rel=1e-6)
    assert {name.rsplit("/", 1)[0] for name in values} == {"model", *dict(run.model.named_parameters())}


def test_known_vectors() -> None:
    """One vector is at a right angle, one twice as long, one opposite, and one has a true gradient of zero."""
    own = {"turned": [0.0, 3.0], "doubled": [2.0, 4.0], "reversed": [-1.0, 1.0], "spurious": [1.0, 0.0]}
    true = {"turned": [4.0, 0.0], "doubled": [1.0, 2.0], "reversed": [1.0, -1.0], "spurious": [0.0, 0.0]}
    g, h = ({name: torch.tensor(v) for name, v in vectors.items()} for vectors in (own, true))
    values = compare(list(own), squared_norms(g, h).numpy())
    rows = {name: [values[f"{name}/{quantity}"] for quantity in QUANTITIES] for name in own}
    assert rows["turned"] == pytest.approx([1.25, 1.5625, 0, 0.75])
    assert rows["doubled"] == pytest.approx([1, 1, 1, 2])
    assert rows["reversed"] == pytest.approx([2, 4, -1, 1])
    assert rows["spurious"] == pytest.approx([np.inf, np.inf, np.nan, np.inf], nan_ok=True)


def test_the_weights_are_those_after_the_step() -> None:
    run, view, values = measured("mxfp4")
    again = GradientBias(config.GradientBias(every_steps=1)).measure(view)
    assert again["model/ratio"] == values["model/ratio"]
    run.optimizer.zero_grad(set_to_none=True)
    train_step(run, 1)
    assert GradientBias(config.GradientBias(every_steps=1)).measure(view)["model/ratio"] != values["model/ratio"]


def rotating(norm: config.Norm, signs: str) -> tuple[Decoder, NormLinear, torch.Tensor]:
    """Return a model whose forward is under a transform, a linear of it, and an input of that with outliers."""
    cast = config.Cast(format="E4M3")
    rotated = Gemms(forward_x=cast, forward_w=cast, forward_transform=config.Hadamard(size=32, signs=signs))
    schedule = (config.PrecisionRow(plan={"layers.*": "rotated"}),)
    precision = config.Precision(schedule=schedule, recipes={"rotated": rotated})
    run, _ = tiny.build(replace(tiny.CONFIG, norm=norm, precision=precision))
    linear = next(
        module for module in run.model.modules() if isinstance(module, NormLinear) and any(module.gemms.casts())
    )
    x = torch.randn(4, linear.norm.size, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 30
    return run.model, linear, x


@each("norm", ESTIMATED)
def test_the_pass_in_fp32_estimates_from_the_blocks_of_the_run(norm: config.Norm) -> None:
    """A transform spreads an outlier over its block, and so changes what is estimated."""
    model, linear, x = rotating(norm, "none")
    own = linear.rms(x)
    assert not torch.allclose(own, linear.norm.rms(x), rtol=0.1)  # without the transform
    with borrowed(model, Gemms(), torch.float32):
        assert torch.equal(linear.rms(x), own)


@each("norm", ESTIMATED)
def test_an_evaluation_estimates_under_the_signs_of_its_own_cast(norm: config.Norm) -> None:
    model, linear, x = rotating(norm, "step")
    move_to(model, 3, 0)
    own = linear.rms(x)
    by_seed = rotating(norm, "seed")[1].rms(x)
    with evaluated(model):
        assert torch.equal(linear.rms(x), by_seed)
    assert torch.equal(linear.rms(x), own)
    assert not torch.equal(own, by_seed)
