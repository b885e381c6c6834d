"""A gradient with one operand quantised is that of a run whose recipe has that cast alone, and that of the formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from each import each, slow_but
from precision_files import of_file
from torch import Tensor

from mxstudy import config
from mxstudy.config import Gemms
from mxstudy.config.casts import OPERANDS, TRANSFORMS, BlockCast
from mxstudy.model.linear import MXLinear
from mxstudy.model.modules import modules_of
from mxstudy.numerics.cast import block_cast
from mxstudy.numerics.gemms import Linear, mx_linear
from mxstudy.probes.gradient_bias import BY_OPERAND, GradientBias, by_operand, compare, squared_norms
from mxstudy.probes.operand_bias import of_each_operand, recipes_set, with_casts
from mxstudy.probes.shadow import capture_linears, shadow_gradients
from mxstudy.train.loop import train_step

MOE = replace(tiny.MODEL, ffn_size=32, num_layers=1, mlp="moe", moe=config.MoE(num_experts=4))
WIDE = replace(tiny.MODEL, hidden_size=128, ffn_size=128, num_layers=1)


def of_recipe(name: str, norm: config.Norm, model: config.Decoder = WIDE) -> config.Pretrain:
    """Return the config of a run in that recipe, which its precision has by the name `own`."""
    given = of_file(name) if name not in config.PRECISIONS else tiny.precision((0, name))
    own = {"own": given.recipe(name)}
    schedule = (config.PrecisionRow(plan={"layers.*": "own"}),)
    return replace(tiny.CONFIG, model=model, norm=norm, precision=replace(given, schedule=schedule, recipes=own))


def only(given: config.Pretrain, *operands: str) -> config.Pretrain:
    """Return the config with the casts of those operands alone, and all transforms."""
    recipe = given.precision.recipes["own"]
    kept = {name: getattr(recipe, name) for name in (*operands, *TRANSFORMS)}
    return replace(given, precision=replace(given.precision, recipes={"own": Gemms(**kept)}))


def gradients(given: config.Pretrain) -> dict[str, Tensor]:
    run, _ = tiny.build(given)
    return shadow_gradients(run.model, run.first_sequence(0))[1]


RUNS = {
    "folded gain": of_recipe("mxfp8_e5m2_grad", tiny.MXNORM),
    "rounds stochastically": of_recipe("nvfp4", tiny.RMSNORM, replace(WIDE, num_layers=2)),
    "random signs": of_recipe("mxfp4_h16_random", tiny.MXNORM),
    "from the forward": of_recipe("quartet", config.LayerNorm(bias=True)),
    "scales in FP32": of_recipe("fp8_blockwise", tiny.RMSNORM),
    "in part": of_recipe("mxfp8_bf16_act_fwd", tiny.RMSNORM),
    "experts": of_recipe("mx_mix", tiny.RMSNORM, MOE),
}
READS = {"dgrad_w": ("forward_w",), "wgrad_x": ("forward_x",)}


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_but(["rounds stochastically", "from the forward", "experts"], RUNS))
def test_each_gradient_is_that_of_a_run_with_one_cast(name: str) -> None:
    given = RUNS[name]
    recipe = given.precision.recipes["own"]
    run, _ = tiny.build(given)
    found = of_each_operand(run.model, run.first_sequence(0), squared_norms)
    assert list(found) == [operand for operand, _ in recipe.casts()]
    for operand, cast in recipe.casts():
        read = READS[operand] if cast.source == "forward" else ()
        expected = squared_norms(gradients(only(given, operand, *read)), gradients(only(given, *read)))
        assert torch.equal(found[operand], expected), operand
        assert expected[:, 2].sum() > 0


CAST, SIZE = config.Cast(format="E4M3").filled(BlockCast()), 64


@each("operand", OPERANDS)
def test_a_linear_is_that_of_the_formulas(operand: str) -> None:
    """Blocks lie along the axis over which each GEMM sums."""
    generator = torch.Generator().manual_seed(0)
    x, w, dh = (torch.randn(SIZE, SIZE, generator=generator, requires_grad=True) for _ in range(3))
    axes = dict(zip(OPERANDS, (-1, -1, -1, -2, -2, -2), strict=True))
    made = dict(zip(OPERANDS, (x, w, dh, w, dh, x), strict=True))
    made = {name: tensor.detach() for name, tensor in made.items()}
    made[operand] = block_cast(made[operand], "E4M3", axes[operand], BlockCast()).dequantize()
    full = Gemms(**dict.fromkeys(OPERANDS, CAST))
    h = mx_linear(x, w, Linear(with_casts(full, {operand})))
    dx, dw = torch.autograd.grad(h, (x, w), dh)
    torch.testing.assert_close(h, made["forward_x"] @ made["forward_w"].T)
    torch.testing.assert_close(dx, made["dgrad_dh"] @ made["dgrad_w"])
    torch.testing.assert_close(dw, made["wgrad_dh"].T @ made["wgrad_x"])


def test_the_values_of_one_weight_are_those_of_numpy() -> None:
    """Forward and output gradients are those without a cast when X of wgrad is quantised."""
    run, _ = tiny.build(replace(tiny.CONFIG, norm=tiny.RMSNORM))
    sequence, name = run.first_sequence(0), "layers.1.feed_forward.w2"
    values = by_operand(run.model, sequence)
    linears = list(modules_of(run.model, MXLinear).values())
    with recipes_set(linears, [with_casts(linear.gemms, {"wgrad_x"}) for linear in linears]):
        captured = capture_linears(run.model, sequence, sequence[0].numel())[name]
    x, dh = captured.sources().x_TI.float(), captured.dh_TO.float()
    q = block_cast(x, "E4M3", -2, BlockCast()).dequantize()
    g, h = ((dh.T @ operand).bfloat16().double().numpy().ravel() for operand in (q, x))
    lengths = np.linalg.norm(g), np.linalg.norm(h)
    assert values[f"{name}.weight/wgrad_x/ratio"] == pytest.approx(np.linalg.norm(g - h) / lengths[1], rel=1e-6)
    assert values[f"{name}.weight/wgrad_x/cosine"] == pytest.approx(g @ h / np.prod(lengths), rel=1e-9)


def test_an_operand_of_wgrad_changes_the_gradients_of_quantised_weights_alone() -> None:
    run, _ = tiny.build(replace(tiny.CONFIG, norm=tiny.RMSNORM))
    values = by_operand(run.model, run.first_sequence(0))
    weights = {
        f"{name}.weight" for name, linear in modules_of(run.model, MXLinear).items() if any(linear.gemms.casts())
    }
    for operand in ("wgrad_x", "wgrad_dh"):
        changed = {name for name in dict(run.model.named_parameters()) if values[f"{name}/{operand}/ratio"]}
        assert changed == weights


@each("row", ["mxfp8", "mxfp4"])
def test_the_squares_of_the_differences_add_up_to_that_of_the_recipe(row: str) -> None:
    run, _ = tiny.build(replace(tiny.CONFIG, norm=tiny.RMSNORM, precision=tiny.precision((0, row))), compute="fp32")
    values = GradientBias(config.GradientBias(every_steps=1, by_operand=True)).measure(train_step(run, 0))
    parts = [values[f"model/{operand}/ratio"] for operand in OPERANDS]
    assert np.square(parts).sum() == pytest.approx(values["model/squared_ratio"], rel=0.2)


@pytest.mark.integration
def test_it_adds_values_and_changes_none() -> None:
    run, _ = tiny.build()
    view = train_step(run, 0)
    off, on = (
        GradientBias(config.GradientBias(every_steps=1, by_operand=word)).measure(view) for word in (False, True)
    )
    parameters = [*dict(run.model.named_parameters()), "model"]
    added = {f"{name}/{operand}{quantity}" for name in parameters for operand in OPERANDS for quantity in BY_OPERAND}
    assert set(on) - set(off) == added
    assert {name: on[name] for name in off if name != "model/cost_ms"} == {
        name: value for name, value in off.items() if name != "model/cost_ms"
    }
    assert on["model/cost_ms"] > off["model/cost_ms"]


def test_without_casts_there_is_no_operand() -> None:
    run, _ = tiny.build(replace(tiny.CONFIG, precision=tiny.precision((0, "bf16"))))
    assert by_operand(run.model, run.first_sequence(0)) == {}


def test_the_hardware_gemm_is_off_for_a_pass_and_on_again() -> None:
    """It multiplies two quantised operands."""
    linear = modules_of(tiny.build()[0].model, MXLinear)["layers.0.attention.wo"]
    linear.native, own = True, linear.gemms
    with recipes_set([linear], [Gemms()]):
        assert (linear.gemms, linear.native) == (Gemms(), False)
    assert linear.native
    assert linear.gemms is own


def test_the_quantities_of_known_vectors_keep_their_names() -> None:
    g, h = {"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])}
    values = compare(["w/forward_x"], squared_norms(g, h).numpy())
    assert {key: value for key, value in values.items() if key.endswith(BY_OPERAND)} == {
        "w/forward_x/ratio": 1.0,
        "w/forward_x/cosine": 1.0,
    }
