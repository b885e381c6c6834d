"""A stack of students has the bits of its replicas alone, their initial weights, and roundings beside the GEMMs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each import each, slow_but
from small_students import (
    ATTENTION,
    BF16,
    CAST,
    FP32,
    LAYER_NORM,
    LAYERS,
    NORMS,
    SIZE,
    TOKENS,
    run,
    samples,
    small,
    student,
)
from torch import Tensor

from mxstudy import config
from mxstudy.model import NormLinear
from mxstudy.model.precision import apply_precision
from mxstudy.numerics import fake_quantize
from mxstudy.reader import ConfigError
from mxstudy.students.model import ResidualMLP
from mxstudy.students.replicas import stack

pytestmark = pytest.mark.integration

# --------------------------------------------------------------------------------------------------------------- stacks


ROWS = ["fp32", "mxfp8", "fp8_tensor", "mxfp6_e2m3"]
SEEDS = [5, 0, 9, 2]
MODELS = {"mlp": small(), "attention": small(**ATTENTION)}


@pytest.mark.parametrize(
    ("norm", "ops"),
    [
        ("none", "fp32"),
        *((name, "fp32") for name in list(NORMS)[1:]),
        *(("layernorm", ops) for ops in ("bf16", "code", "code_skipped")),
    ],
)
@pytest.mark.parametrize(
    ("model", "row"),
    slow_but(
        [("mlp", "fp32"), ("mlp", "fp8_tensor"), ("attention", "mxfp8")], [(m, row) for m in MODELS for row in ROWS]
    ),
)
def test_a_replica_is_the_student_alone(model: str, norm: str, ops: str, row: str) -> None:
    """Stacks of 4, 2 and 1 and a single student have equal bits.

    One neighbour has weights 2^40 times larger, and another is NaN.
    """
    compute = FP32 if row == "fp32" else BF16
    options = {"row": row, "compute": compute, "gain": "fp32" if norm == "none" else "bf16"}
    options |= {"norm_ops": ops} if ops == "code_skipped" else {"vector_ops": ops}
    x, dy = samples(TOKENS, SIZE), samples(4, TOKENS, SIZE)

    def at_large(mlp: ResidualMLP, seeds: list[int]) -> ResidualMLP:
        with torch.no_grad():
            for layer in mlp.layers:
                for linear in [layer.up] if layer.attention is None else [layer.up, layer.attention.qkv]:
                    weight = linear.weight if linear.weight.ndim == 3 else linear.weight[None]
                    weight[[seed == 0 for seed in seeds]] *= 2.0**40
                    weight[[seed == 9 for seed in seeds], 3, 3] = torch.nan
        return mlp

    together = run(at_large(student(MODELS[model], NORMS[norm], SEEDS, **options), SEEDS), x, dy)
    assert together["y"][2].isnan().all()
    for slots in ([2, 3], [3, 0], [1]):
        seeds = [SEEDS[slot] for slot in slots]
        assert_same(
            run(at_large(student(MODELS[model], NORMS[norm], seeds, **options), seeds), x, dy[slots]), together, slots
        )
    for slot, seed in enumerate(SEEDS):
        alone = at_large(student(MODELS[model], NORMS[norm], [seed], stacked=False, **options), [seed])
        assert_same({n: t[None] for n, t in run(alone, x, dy[slot]).items()}, together, [slot])


def assert_same(some: dict[str, Tensor], all_of_them: dict[str, Tensor], slots: list[int]) -> None:
    for name, found in some.items():
        want = all_of_them[name][slots].view_as(found)
        assert torch.equal(found.isnan(), want.isnan()), name
        assert torch.equal(found.nan_to_num(), want.nan_to_num()), name


def test_replicas_may_have_samples_of_their_own() -> None:
    mlp, x = student(small(), LAYER_NORM, [1, 2]), samples(2, TOKENS, SIZE)
    for r in range(2):
        assert torch.equal(mlp(x)[r], mlp(x[r])[r])


# ------------------------------------------------------------------------------------------------------ initialisation


def drawn(init: str, seeds: list[int], **options: Any) -> dict[str, Tensor]:
    mlp = ResidualMLP(small(init=init, **options), LAYER_NORM, CAST, FP32)
    stack(mlp, len(seeds))
    mlp.init_weights(seeds)
    return {name: parameter.detach() for name, parameter in mlp.named_parameters()}


@pytest.mark.parametrize("init", ["torch", "xavier"])
def test_initial_weights_are_those_of_the_seed_in_any_stack(init: str) -> None:
    wide, narrow = drawn(init, [7, 8, 9]), drawn(init, [9])
    for name, parameter in narrow.items():
        assert torch.equal(parameter[0], wide[name][2])
    weight = wide["layers.0.up.weight"]
    assert not torch.equal(weight[0], weight[1])
    assert not torch.equal(weight, wide["layers.1.up.weight"])


def test_torchs_default_and_xaviers_low_gain() -> None:
    wide = drawn("torch", [0, 1], activation="swiglu", hidden_size=96)
    assert wide["layers.0.up.weight"].shape == (2, 2 * 256, 96)
    for name, fan_in in {"up.weight": 96, "down.weight": 256, "bias": 256}.items():
        numbers = wide[f"layers.0.{name}"].double()
        assert 0.9 < numbers.abs().max() * fan_in**0.5 <= 1
        assert numbers.std() * (3 * fan_in) ** 0.5 == pytest.approx(1, abs=0.1 if name == "bias" else 0.01)
    low = drawn("xavier", [0, 1])
    assert (low["layers.1.bias"] == 0).all()
    for name in ("up.weight", "down.weight"):
        assert low[f"layers.1.{name}"].std() == pytest.approx(0.5 * (2 / (64 + 256)) ** 0.5, rel=0.02)
    assert (low["layers.1.up.norm.weight"] == 1).all()
    assert (low["layers.1.up.norm.bias"] == 0).all()


def test_a_seed_for_each_replica() -> None:
    mlp = ResidualMLP(small(), LAYER_NORM, CAST, FP32)
    stack(mlp, 3)
    with pytest.raises(ConfigError, match="seeds: 2 for 3 replicas"):
        mlp.init_weights([1, 2])


@each(("size", "inner"), [(256, 672), (512, 1376), (768, 2048), (64, 160)])
def test_inner_sizes(size: int, inner: int) -> None:
    """The inner size is 8 d / 3 to the nearest multiple of 32, or as in the public code."""
    assert small(hidden_size=size, activation="swiglu").ffn_size == inner
    assert small(hidden_size=size, activation="swiglu", swiglu_multiple=1).ffn_size == int(8 * size / 3 + 0.5)
    assert small(hidden_size=size).ffn_size == 4 * size


# ------------------------------------------------------------------------------------------------ gain, bias, precision


@each("gain", ["fp32", "bf16", "mx"])
def test_the_gain_is_rounded_and_its_gradient_is_not(gain: str) -> None:
    """A gain that already has these values gives the same output and gradients."""
    mlp = student(small(), LAYER_NORM, [1, 2], "mxfp8", BF16, gain=gain)
    x, dy = samples(TOKENS, SIZE), samples(2, TOKENS, SIZE)
    got = run(mlp, x, dy)
    rounded = student(small(), LAYER_NORM, [1, 2], "mxfp8", BF16)
    rounding = {
        "fp32": lambda t: t,
        "bf16": lambda t: ((t.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32),
        "mx": lambda t: fake_quantize(t.bfloat16().float(), "E4M3", scale_rule="floor", rounding="away"),
    }[gain]
    with torch.no_grad():
        for layer in rounded.layers:
            before = layer.up.norm.weight.clone()
            layer.up.norm.weight.copy_(rounding(before))
            assert torch.equal(layer.up.norm.weight, before) == (gain == "fp32")
    for name, want in run(rounded, x, dy).items():
        assert torch.equal(got[name], want), name


def test_gains_a_little_below_one_collapse_in_mx() -> None:
    """In the paper's example all of them become one value, where bf16 keeps them apart (section 5.1)."""
    mlp = student(small(num_layers=1), LAYER_NORM, [1], "mxfp8", BF16)
    up = mlp.layers[0].up
    with torch.no_grad():
        up.norm.weight.copy_(torch.linspace(0.88, 0.91, SIZE))
        x, shared = samples(TOKENS, SIZE), {}
        for gain in ("mx", "bf16", "fp32"):
            up.gain = gain
            shared[gain] = mlp(x)
        up.norm.weight.fill_(0.875)
        assert torch.equal(mlp(x), shared["mx"])
    assert not torch.equal(shared["mx"], shared["bf16"])
    assert not torch.equal(shared["bf16"], shared["fp32"])


def test_mx_without_a_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="gain: mx takes its format from the linear's forward"):
        student(small(), LAYER_NORM, [1], "bf16", BF16, gain="mx")(samples(TOKENS, SIZE))


def test_a_frozen_bias_has_no_gradient_and_changes_no_other() -> None:
    x, dy = samples(TOKENS, SIZE), samples(1, TOKENS, SIZE)
    free = run(student(small(), LAYER_NORM, [1], "mxfp8", BF16), x, dy)
    frozen = run(student(small(), LAYER_NORM, [1], "mxfp8", BF16, freeze_norm_bias=True), x, dy)
    assert free.keys() - frozen.keys() == {f"layers.{k}.up.norm.bias" for k in range(LAYERS)}
    for name, gradient in frozen.items():
        assert torch.equal(gradient, free[name])


@each(
    ("norm", "options", "message"),
    [
        ("layernorm", {"vector_ops": "bf61"}, "vector_ops: 'bf61' is not a choice; did you mean 'bf16'"),
        ("mxnorm_p2", {"vector_ops": "code"}, "vector_ops: code rounds every step of the norm, but with a folded gain"),
        ("rmsnorm", {"freeze_norm_bias": True}, "freeze_norm_bias: the norm has no bias"),
        ("none", {"freeze_norm_bias": True}, "freeze_norm_bias: the norm has no bias"),
        ("none", {"gain": "bf16"}, "gain: there is no norm to round the gain of"),
        ("none", {"norm_ops": "fp32"}, "norm_ops: there is no norm; set it to null"),
        ("mxnorm_p2", {"norm_ops": "fp32"}, "norm_ops: with a folded gain the norm is fused with the linear"),
        ("layernorm", {"norm_ops": "bf16", "vector_ops": "code"}, "norm_ops: bf16 rounds to the residual stream's"),
        ("layernorm", {"norm_ops": "code_skip"}, "norm_ops: 'code_skip' is not a choice; did you mean 'code_skipped'"),
    ],
)
def test_what_the_norm_cannot_do_is_refused(norm: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ResidualMLP(small(), NORMS[norm], CAST, BF16, **options)


def test_a_precision_plan_reaches_the_student() -> None:
    mlp = student(small(), LAYER_NORM, [1, 2], compute=BF16)
    plan = {"layers.*": "mxfp8", "layers.1.down": "bf16"}
    precision = config.Precision(schedule=(config.PrecisionRow(plan=plan),), scale_rule="even")
    rows = apply_precision(mlp, precision, 0, "bf16", torch.device("cpu"))
    assert rows == dict.fromkeys(("layers.0.up", "layers.0.down", "layers.1.up"), "mxfp8") | {"layers.1.down": "bf16"}
    assert isinstance(mlp.layers[0].up, NormLinear)
    assert mlp.layers[0].up.cast.scale_rule == "even"
    with pytest.raises(ConfigError, match=r"32 does not divide layers.0.up's input size 48"):
        apply_precision(student(small(hidden_size=48), None, [1]), precision, 0, "bf16", torch.device("cpu"))
