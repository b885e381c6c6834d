"""`saturation` of experts is that of each expert's own casts, one expert after the other, by the scalar reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
from numpy.typing import NDArray
from reference_casts import Array, cast_array, element_of, outer_scale
from small_mixtures import group
from torch import Tensor

from mxstudy import config
from mxstudy.config.casts import OPERANDS
from mxstudy.model.moe import mixtures_of
from mxstudy.numerics.dispatch import Dispatch
from mxstudy.probes.base import StepView
from mxstudy.probes.saturation import QUANTISED_FROM, Saturation
from mxstudy.probes.shadow import Captured, capture_linears
from mxstudy.reader import ConfigError, read
from mxstudy.studies.pretrain.check import backends_over
from mxstudy.train.loop import TrainingRun, train_step

pytestmark = pytest.mark.integration
NVFP4 = {"format": "NVFP4", "scale": "E4M3", "block_size": 16, "outer_scale": "tensor"}
TRAINING = NVFP4 | {"chain": "training"}
SQUARE, ROW = TRAINING | {"two_dimensional": True}, TRAINING | {"outer_scale": "row"}
FORWARD, BOUND = TRAINING | {"source": "forward"}, NVFP4 | {"outer_scale": "bound"}
FP8 = {"format": "E5M2", "scale": "none", "outer_scale": "tensor"}
FP32, SMALLER = {"format": "E4M3", "scale": "FP32"}, {"format": "E4M3", "headroom": 0.75}
RECIPES: dict[str, dict[str, Any]] = {
    "fp8_tensor": dict.fromkeys(OPERANDS, FP8),
    "nvfp4": dict.fromkeys(OPERANDS, TRAINING) | dict.fromkeys(("forward_w", "dgrad_w", "wgrad_dh"), SQUARE),
    "from the forward": {"forward_x": NVFP4, "wgrad_x": FORWARD},
    "rows and bounds": {"forward_x": BOUND, "forward_w": ROW, "dgrad_dh": ROW, "wgrad_x": NVFP4},
    "FP32 scales": dict.fromkeys(OPERANDS, FP32),
    "headroom": dict.fromkeys(OPERANDS, SMALLER),
}


def settings_of(recipe: dict[str, Any]) -> config.Pretrain:
    moe = config.MoE(num_experts=4, top_k=2)
    sizes = {"hidden_size": 32, "ffn_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    plan = {"schedule": [{"plan": {"layers.*.feed_forward.w*": "mine"}}], "recipes": {"mine": recipe}}
    return replace(
        tiny.CONFIG,
        model=replace(tiny.MODEL, **sizes, mlp="moe", moe=moe),
        norm=tiny.RMSNORM,
        precision=read(config.Precision, plan),
        probe=config.Probes(saturation=config.Saturation(every_steps=1)),
    )


def stepped(recipe: dict[str, Any], is_grouped: bool) -> tuple[TrainingRun, StepView]:
    run, _ = tiny.build(settings_of(recipe))
    group(run.model, is_grouped)
    return run, train_step(run, 0)


def parts(x: Tensor, captured: Captured) -> Iterator[Array]:
    """Yield each expert's matrix: its weight, or its rows with the zeros that pad them."""
    (dispatch,) = (part for part in captured.inputs if isinstance(part, Dispatch))
    ends = dispatch.ends_E.tolist()
    of_experts = x if x.ndim == 3 else (x[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))
    yield from (part.float().numpy() for part in of_experts)


def spread(scales: Array, shape: tuple[int, ...]) -> Array:
    """Return the scale of each element."""
    sizes = [size // blocks for size, blocks in zip(shape, scales.shape, strict=True)]
    return np.kron(scales, np.ones(sizes, np.float32))


def any_of_block(holds: NDArray[np.bool_], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return whether it holds for an element of each block."""
    rows, columns = shape
    return holds.reshape(rows, holds.shape[0] // rows, columns, -1).any((1, 3))


def by_expert(captured: Captured, operand: str) -> dict[str, float]:
    """Return the quantities of an operand from the cast of each expert's matrix."""
    of, cast = captured.sources(), getattr(captured.linear.gemms, operand)
    source, axis = QUANTISED_FROM[operand]
    x = captured.dh_TO if source == "dh_TO" else getattr(of, source)
    axis = 1 if cast.scale == "none" else axis % 2  # each row counts once if there are no blocks
    bound = None if of.bounds is None else of.bounds.forward.item()
    top = element_of(cast).max
    above = largest = vanished = size = signal = noise = 0.0
    exponents: list[float] = []
    is_subnormal: list[bool] = []
    for own in parts(x, captured):
        if cast.source == "forward":
            forward = getattr(captured.linear.gemms, f"forward_{operand[-1]}")
            own = cast_array(own, forward, 1, outer_scale(own, forward, 1)).decoded.astype(np.float32)
        got = cast_array(own, cast, axis, outer_scale(own, cast, axis, bound))
        scales = np.ldexp(1.0, got.scales.astype(int) - 127) if cast.scale == "E8M0" else got.scales
        factors = np.float32(scales) * np.float32(1.0 if got.outer is None else got.outer)
        factor = spread(factors, own.shape)
        above += ((abs(own) > np.float32(top) * factor) & (factor > 0)).sum()
        largest += ((abs(got.values) == top) & (factor > 0)).sum()
        vanished += ((got.decoded == 0) & (own != 0)).sum()
        size += own.size
        signal += (own.astype(float) ** 2).sum()
        noise += ((got.decoded - own) ** 2).sum()
        exponents += np.floor(np.log2(factors[any_of_block(got.decoded != 0, factors.shape)])).tolist()
        is_subnormal += (scales[any_of_block(own != 0, scales.shape)] < 2.0**-6).tolist()
    found = {
        "overflow_fraction": above / x.numel(),
        "max_fraction": largest / x.numel(),
        "underflow_fraction": vanished / x.numel(),
        "sqnr_db": 10 * np.log10(signal / noise),
        "scale_exponent_mean": np.mean(exponents),
        "scale_exponent_min": min(exponents),
        "scale_exponent_max": max(exponents),
    }
    return found | ({"subnormal_scale_fraction": np.mean(is_subnormal)} if cast.scale == "E4M3" else {})


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_each_expert_is_measured_under_its_own_scale(recipe: dict[str, Any]) -> None:
    run, view = stepped(recipe, is_grouped=False)
    backends_over(run.config, 1)
    values = Saturation(config.Saturation(every_steps=1)).measure(view)
    captured = capture_linears(run.model, view.first_sequence(), view.tokens)
    for name in ("w13", "w2"):
        linear = f"layers.0.feed_forward.{name}"
        for operand, _ in captured[linear].linear.gemms.casts():
            expected = by_expert(captured[linear], operand)
            got = {quantity: values[f"{linear}/{operand}/{quantity}"] for quantity in expected}
            assert got == pytest.approx(expected, rel=1e-5), operand


def test_the_scales_of_experts_differ() -> None:
    """Else a scale of all experts together would pass the test above."""
    run, view = stepped(RECIPES["fp8_tensor"], is_grouped=False)
    captured = capture_linears(run.model, view.first_sequence(), view.tokens)["layers.0.feed_forward.w2"]
    for x in (captured.sources().x_TI, captured.dh_TO, captured.linear.weight):
        assert len({abs(own).max().item() for own in parts(x.detach(), captured)}) > 2


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4"])
def test_a_step_in_one_grouped_gemm_is_measured_as_one_in_the_loop(name: str) -> None:
    loop, grouped = (stepped(RECIPES[name], is_grouped)[1] for is_grouped in (False, True))
    measured = [Saturation(config.Saturation(every_steps=1)).measure(view) for view in (loop, grouped)]
    assert measured[0] == measured[1]
    assert all(mixture.is_grouped for mixture in mixtures_of(grouped.model).values())


@pytest.mark.parametrize(("operand", "outer"), [("wgrad_dh", "row"), ("wgrad_x", "bound")])
def test_a_scale_for_each_column_of_an_expert_is_refused(operand: str, outer: str) -> None:
    """X of the second linear has no bound, so that its cast along the tokens has a scale for each column."""
    settings = settings_of({operand: NVFP4 | {"outer_scale": outer}})
    with pytest.raises(ConfigError, match=rf"^probe\.saturation\.every_steps: .* their {operand} has a scale for each"):
        backends_over(settings, 1)
    assert backends_over(replace(settings, probe=config.Probes()), 1)
