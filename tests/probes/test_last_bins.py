"""Last bins of a language model's gains and biases, also of queries and keys, equal a count by the paper's formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from reference import ELEMENTS, scale_exponents
from torch import Tensor, nn

from mxstudy import config
from mxstudy.model import Decoder
from mxstudy.model.norm import Norm
from mxstudy.model.precision import apply_precision
from mxstudy.probes.base import StepView
from mxstudy.probes.last_bins import LastBin
from mxstudy.reader import ConfigError
from mxstudy.studies.pretrain.check import backends_over

MODEL = config.Decoder(
    hidden_size=64, ffn_size=96, num_layers=1, num_heads=4, num_kv_heads=2, vocab_size=128, qk_norm=True
)


def decoder(plan: dict[str, str], norm: config.Norm, model: config.Decoder = MODEL, **settings: object) -> Decoder:
    precision = config.Precision(schedule=(config.PrecisionRow(plan=plan),), scale_rule="floor", **settings)
    built = Decoder(model, norm, precision.settings, torch.bfloat16)
    built.init_weights(0)
    apply_precision(built, precision, 0, "bf16", torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for module in built.modules():
        if isinstance(module, Norm):
            for parameter in module.parameters():
                nn.init.normal_(parameter, 0.9, 0.02, generator=generator)
    return built


def measured(model: Decoder) -> dict[str, float]:
    view = StepView(0, lambda: torch.ones(2), model, lambda: pytest.fail("no batch is needed"), 1)
    return LastBin(config.LastBin(every_steps=1)).measure(view)


def counted(vector: Tensor, name: str, block_size: int = 32) -> tuple[float, float]:
    """Return the shares above max * 2^(floor(log2 absmax) - emax) and above 0.875 absmax.

    Blocks are filled up with zeros.
    """
    x = np.abs(vector.detach().double().numpy())
    blocks = np.pad(x, (0, -len(x) % block_size)).reshape(-1, block_size)
    absmax, element = blocks.max(-1, keepdims=True), ELEMENTS[name]
    limit = np.ldexp(element.max, scale_exponents(absmax, element, "floor"))
    return (blocks > limit).sum() / len(x), (blocks > 0.875 * absmax).sum() / len(x)


def test_every_gain_and_bias_is_counted_in_the_format_of_the_forwards_x() -> None:
    model = decoder({"layers.*": "mxfp8_e5m2_act"}, config.LayerNorm(bias=True))
    found = measured(model)
    parameters = {name: p for name, p in model.named_parameters() if p.ndim == 1}
    assert {name.rsplit("/")[0] for name in found if not name.startswith("gaussian")} == set(parameters)
    assert len(parameters) == 2 * 5
    assert {name.rpartition("/")[2] for name in found} == {"overflow_fraction", "max_fraction", "literal_fraction"}
    for name, parameter in parameters.items():
        fmt = "E4M3" if name.startswith("norm.") else "E5M2"  # the head quantises nothing
        overflow, literal = counted(parameter, fmt)
        assert found[f"{name}/floor/overflow_fraction"] == pytest.approx(overflow)
        assert found[f"{name}/literal_fraction"] == pytest.approx(literal)
    assert found["layers.0.attention.q_norm.weight/floor/overflow_fraction"] > 0.5
    assert found["gaussian.E5M2/floor/overflow_fraction"] == pytest.approx(0.0086, abs=2e-4)


def test_gains_are_counted_whether_they_are_in_mx_or_not_and_blocks_need_not_divide_them() -> None:
    by_head = config.Decoder(**(vars(MODEL) | {"qk_norm_by_head": True}))
    found = measured(model := decoder({"layers.*": "bf16"}, config.LayerNorm(), by_head))
    q_norm = model.layers[0].attention.q_norm.weight
    assert q_norm.numel() == 16
    assert found["layers.0.attention.q_norm.weight/floor/overflow_fraction"] == pytest.approx(
        counted(q_norm, "E4M3")[0]
    )


def test_norms_without_gains_have_nothing_to_count() -> None:
    assert measured(decoder({"layers.*": "mxfp8"}, config.LayerNorm(affine=False))) == {}


E2M1 = config.Cast(format="E2M1", scale_rule="floor")
NVFP4 = config.Cast(format="NVFP4", scale="E4M3", outer_scale="tensor")
OTHERS = {
    "scale=E4M3": NVFP4,
    "headroom=0.75": replace(E2M1, headroom=0.75),
    "candidates=[1.0,1.5]": replace(E2M1, candidates=(1.0, 1.5)),
}


def probed(cast: config.Cast, gain: str | None, every_steps: int = 1) -> config.Pretrain:
    """Return a run whose forward casts X so, and which measures its gains."""
    recipes = {"own": config.Gemms(forward_x=cast)}
    block_size = 16 if cast == NVFP4 else 32
    return replace(
        tiny.CONFIG,
        norm=tiny.RMSNORM,
        precision=replace(tiny.precision((0, "own")), recipes=recipes, gain=gain, block_size=block_size),
        probe=config.Probes(last_bin=config.LastBin(every_steps=every_steps)),
    )


@pytest.mark.parametrize("field", OTHERS)
def test_gains_that_a_run_rounds_by_a_cast_that_the_probe_does_not_know_are_refused(field: str) -> None:
    known = {"scale": "E8M0", "headroom": "1.0", "candidates": "[1.0]"}
    name = field.partition("=")[0]
    with pytest.raises(ConfigError) as refusal:
        backends_over(probed(OTHERS[field], "mx"), 1)
    assert str(refusal.value) == (
        f"probe.last_bin.every_steps: precision.gain=mx rounds the gains of layers.0.attention.wqkv.norm with {field}, "
        f"but the probe measures casts with {name}={known[name]} alone; set it to 0, or precision.gain to bf16"
    )
    for accepted in (probed(OTHERS[field], "bf16"), probed(OTHERS[field], "mx", every_steps=0), probed(E2M1, "mx")):
        backends_over(accepted, 1)
