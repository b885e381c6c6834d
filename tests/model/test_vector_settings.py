"""Gains and biases of a decoder's norms, rounded or in MX, agree with the reference.

So do operations that are rounded one by one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference import fake_quantize_array, to_dtype
from torch import Tensor, nn

from mxstudy import config
from mxstudy.config import Cast, Gemms
from mxstudy.model import Decoder
from mxstudy.model.describe_precision import describe
from mxstudy.model.linear import NormLinear
from mxstudy.model.norm import Norm
from mxstudy.model.precision import DTYPES, apply_precision
from mxstudy.model.vector_settings import norms_of
from mxstudy.numerics.gemms import mx_linear
from mxstudy.numerics.vector_ops import gelu_op_by_op, norm_op_by_op, silu_op_by_op
from mxstudy.probes.shadow import shadow_gradients
from mxstudy.reader import ConfigError

CPU = torch.device("cpu")
MODEL = config.Decoder(
    hidden_size=64, ffn_size=96, num_layers=2, num_heads=2, num_kv_heads=1, vocab_size=128, qk_norm=True, mlp="gelu"
)
LAYER_NORM = config.LayerNorm(bias=True)
PUBLIC = {"scale_rule": "floor", "rounding": "away", "operand_pre_round": True}


def precision(plan: str | dict[str, str] = "mxfp8", **settings: Any) -> config.Precision:
    plan = {"layers.*": plan} if isinstance(plan, str) else plan
    return config.Precision(schedule=(config.PrecisionRow(plan=plan),), **settings)


def decoder(
    asked: config.Precision, model: config.Decoder = MODEL, norm: config.Norm = LAYER_NORM, compute: str = "bf16"
) -> Decoder:
    """Return a decoder with gains about 0.9, where the floor rule clamps, and with biases."""
    built = Decoder(model, norm, asked.settings, DTYPES[compute])
    built.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    for module in built.modules():
        if isinstance(module, Norm):
            for parameter in module.parameters():
                nn.init.normal_(parameter, 0.9, 0.02, generator=generator)
    apply_precision(built, asked, 0, compute, CPU)
    return built


def tokens() -> Tensor:
    return torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(2))


def step(model: Decoder) -> dict[str, Tensor]:
    """Return the logits, and the gradient of every parameter."""
    logits = model(tokens())
    (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).square().mean().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def rounded(vector: Tensor, gain: str, settings: dict[str, Any]) -> np.ndarray:
    """Return the vector rounded by the reference, in blocks of 32 along it, or to bf16."""
    x = vector.detach().double().numpy()
    if gain == "bf16":
        return to_dtype(x, "bfloat16", "away" if settings else "even")
    return fake_quantize_array(x, "E5M2", **settings)


@pytest.mark.parametrize("gain", ["mx", "bf16"])
@pytest.mark.parametrize("settings", [PUBLIC, {}], ids=["public", "default"])
def test_gains_and_biases_are_the_references_and_the_gradient_goes_straight_through(
    gain: str, settings: dict[str, Any]
) -> None:
    """The decoder equals a model whose parameters have the rounded values, in FP32.

    The forward's W is in E4M3, so that the format is that of X. The final norm has no quantised linear: in mx it keeps
    the compute dtype, which this test gives it too.
    """
    own, want = (decoder(precision("mxfp8_e5m2_act", gain=g, **settings)) for g in (gain, "fp32"))
    want.norm.rounding = None if gain == "mx" else want.norm.rounding
    for name, (norm, _) in norms_of(want).items():
        if name != "norm" or gain == "bf16":
            for parameter in norm.parameters():
                parameter.data = torch.from_numpy(rounded(parameter, gain, settings)).float()
    assert all(
        (norm.rounding is None) == (gain == "mx" and name == "norm") for name, (norm, _) in norms_of(own).items()
    )
    assert all(block.fused is not None for block in own.layers)
    for model in (own, want):
        for block in model.layers:
            block.fused = None
    of_own, of_want = step(own), step(want)
    assert of_own.keys() == of_want.keys()
    for name, values in of_want.items():
        assert torch.equal(of_own[name], values), name
    plain = step(decoder(precision("mxfp8_e5m2_act", **settings)))
    assert torch.equal(plain["logits"], of_own["logits"]) == (gain == "bf16")  # FP32 gains have no ties


def test_a_head_in_mx_has_the_final_norms_gain_in_mx_too() -> None:
    own = decoder(precision(gain="mx", head=True))
    assert own.norm.rounding.cast == own.output.gemms.forward_x


@pytest.mark.parametrize("mlp", ["gelu", "swiglu", "relu2"])
def test_every_operation_of_norms_and_activations_rounds(mlp: str) -> None:
    """Each norm equals `norm_op_by_op` and then the linear, and each activation its function of single operations."""
    model = decoder(precision(vector_ops="bf16", gain="bf16", **PUBLIC), replace(MODEL, mlp=mlp))
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        if isinstance(module, NormLinear | Norm) or module in [block.feed_forward.w2 for block in model.layers]:
            module.register_forward_hook(lambda m, inputs, y: seen.update({m: (inputs[0].detach(), y.detach())}))
    model(tokens())
    for norm, linear in norms_of(model).values():
        module = linear if isinstance(linear, NormLinear) and linear.norm is norm else norm
        x, y = seen[module]
        gain, bias = (torch.from_numpy(rounded(p, "bf16", PUBLIC)).float() for p in (norm.weight, norm.bias))
        want = norm_op_by_op(x, gain, bias, norm.eps, True)
        if module is linear:
            want = mx_linear(want, linear.weight.to(x.dtype), linear.arithmetic)
        assert torch.equal(y, want)
    for block in model.layers:
        (_, h), (z, _) = seen[block.feed_forward.up], seen[block.feed_forward.w2]
        gate, up = h.chunk(2, -1)
        want = {"gelu": gelu_op_by_op(h), "swiglu": silu_op_by_op(gate) * up, "relu2": h.relu().square()}[mlp]
        assert torch.equal(z, want)
        assert block.fused is None


def test_fp32_gradients_know_none_of_these_roundings_and_the_model_keeps_them() -> None:
    sequence = tokens()[:1], tokens()[1:]
    own, plain = decoder(precision(gain="mx", vector_ops="bf16", scale_rule="floor")), decoder(precision())
    want = shadow_gradients(plain, sequence, Gemms(), torch.float32)
    got = shadow_gradients(own, sequence, Gemms(), torch.float32)
    assert torch.equal(got[0], want[0])
    assert all(torch.equal(got[1][name], g) for name, g in want[1].items())
    assert not torch.equal(shadow_gradients(own, sequence)[0], shadow_gradients(plain, sequence)[0])
    assert own.layers[0].attention.q_norm.rounding.precision == "mx"


def test_the_plan_says_what_is_rounded_and_which_blocks_run_module_by_module() -> None:
    asked = precision(gain="mx", vector_ops="bf16", skip_blocks=(0, 1))
    model = decoder(asked)
    said = describe(model, apply_precision(model, asked, 0, "bf16", CPU)).splitlines()
    assert "gains and biases: 4 norms in mx (E4M3), 5 norms in the compute dtype" in said
    assert "vector operations: rounded to bf16 after each operation of a norm or an activation" in said
    assert said[-1] == "2 blocks: reference (the norm's output is op_by_op, which is stored as a tensor)"


def test_the_plan_says_the_outer_scale_of_gains_too() -> None:
    asked = precision("nvfp4_forward_only", gain="mx", block_size=16)
    model = decoder(asked, replace(MODEL, qk_norm=False), config.RMSNorm())
    said = describe(model, apply_precision(model, asked, 0, "bf16", CPU))
    assert "gains and biases: 4 norms in mx (NVFP4, one scale a tensor), 1 norms in the compute dtype" in said


FOLDED = config.RMSNorm(fold_gain=True)
BY_DEVIATION = Cast(format="E2M1", statistic="std")


@pytest.mark.parametrize(
    ("asked", "changes", "message"),
    [
        (precision(gain="mx"), {"norm": FOLDED}, "precision.gain: mx would be cast twice with a folded gain"),
        (precision(gain="mx"), {"norm": config.MXNorm(p=2.0)}, "precision.gain: mx would be cast twice"),
        (precision(gain="bf16"), {"norm": config.LayerNorm(affine=False)}, "precision.gain: the norms have none"),
        (precision("mxfp8_bf16_act", gain="mx"), {}, "precision.gain: mx is the cast of the forward's X, which no"),
        (precision("fp8_tensor", gain="mx"), {}, "precision.gain: mx needs blocks"),
        (
            precision("own", gain="mx", scale_rule="floor", recipes={"own": Gemms(forward_x=BY_DEVIATION)}),
            {},
            "precision.gain: mx would take its scales from the std of blocks, as the forward does, and equal gains",
        ),
        (precision(gain="mx", rounding="stochastic"), {}, "precision.gain: mx would be rounded at random"),
        (
            precision(gain="mx"),
            {"model": replace(MODEL, num_heads=4, qk_norm_by_head=True)},
            "precision.block_size: 32 does not divide layers.0.attention.q_norm's 16 gains",
        ),
        (precision(vector_ops="bf16"), {"norm": FOLDED}, "precision.vector_ops: bf16 rounds every operation of a norm"),
        (precision("bf16", vector_ops="bf16"), {"compute": "fp32"}, "precision.*train.compute"),
        (precision(vector_ops="bf16"), {"model": replace(MODEL, mlp="moe")}, "precision.vector_ops: bf16 is for dense"),
        (
            precision(gain="bf16", backend="fused", vector_ops="bf16"),
            {},
            "precision.backend: fused cannot run layers.0: the norm's output is op_by_op",
        ),
    ],
)
def test_what_cannot_be_is_refused(asked: config.Precision, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder(asked, **changes)


@pytest.mark.parametrize("plans", [("mxfp8", "bf16"), ("bf16", "mxfp8")], ids=" then ".join)
def test_gains_are_in_mx_while_a_schedule_quantises_their_readers(plans: tuple[str, str]) -> None:
    rows = [config.PrecisionRow(from_step=5 * i, plan={"layers.*": plan}) for i, plan in enumerate(plans)]
    asked = config.Precision(schedule=tuple(rows), gain="mx")
    built = decoder(asked)
    for first, plan in zip((0, 5), plans, strict=True):
        apply_precision(built, asked, first, "bf16", CPU)
        are_plain = {norm.rounding is None for name, (norm, _) in norms_of(built).items() if "layers" in name}
        assert are_plain == {plan == "bf16"}


def test_gains_in_mx_are_refused_if_no_row_of_a_schedule_quantises_their_readers() -> None:
    rows = (config.PrecisionRow(plan={"layers.*": "bf16"}), config.PrecisionRow(from_step=5, plan={"layers.*": "bf16"}))
    with pytest.raises(ConfigError, match=r"precision\.gain: mx is the cast of the forward's X, which no"):
        decoder(config.Precision(schedule=rows, gain="mx"))
