"""The plan of a mixture of experts has its backend, the casts of its linears, and refusals."""

from dataclasses import replace

import pytest
import torch
from small_mixtures import CPU, CUDA, DENSE, MOE, NORMS, build, plan

from mxstudy import config
from mxstudy.model.decoder import Decoder
from mxstudy.model.fusable import linears_in
from mxstudy.model.moe import mixtures_of
from mxstudy.model.precision import apply_precision, check_tokens
from mxstudy.reader import ConfigError, read


@pytest.mark.parametrize(
    ("row", "device", "compiled", "backend", "why"),
    [
        ("mxfp8", CPU, False, "reference", "on CPU its experts are computed one after the other"),
        ("mxfp8", CPU, True, "grouped", None),
        ("mxfp8", CUDA, True, "grouped", None),
        ("bf16", CUDA, False, "grouped", None),
        ("fp8_tensor", CPU, False, "reference", "on CPU its experts are computed one after the other"),
        ("fp8_tensor", CUDA, True, "grouped", None),
        ("fp32", CUDA, False, "reference", "the grouped GEMM of its experts is in bf16"),
    ],
)
def test_a_backend_is_chosen_and_says_why(row, device, compiled, backend, why):
    model = build(MOE, "rmsnorm", row, device, compiled)
    for block in model.layers:
        assert block.backend.name == backend
        assert (why or "") in (block.backend.why or "")
        assert block.feed_forward.is_grouped == (backend == "grouped")
        by_kernel = {linear.casts_by_kernel for linear in linears_in(block)}
        assert by_kernel == {backend == "grouped" and device == CUDA and row in ("bf16", "mxfp8")}


SCALES_OF_COLUMNS = {"format": "NVFP4", "scale": "E4M3", "block_size": 16}


@pytest.mark.parametrize(
    ("casts", "why"),
    [
        (
            {"wgrad_x": {"format": "E4M3", "scale": "FP32", "block_size": 8}},
            "FP32 scales for blocks of 16, 32, 64, 128, and those of the experts' wgrad_x are of 8",
        ),
        ({"wgrad_x": {"format": "E4M3", "scale": "FP32", "block_size": 128}}, None),
        (
            {"wgrad_dh": SCALES_OF_COLUMNS | {"outer_scale": "row"}},
            "no scale for each column, and the experts' wgrad_dh",
        ),
        (
            {"wgrad_x": SCALES_OF_COLUMNS | {"outer_scale": "bound"}},
            "no scale for each column, and the experts' wgrad_x",
        ),
        ({"dgrad_dh": SCALES_OF_COLUMNS | {"outer_scale": "row"}}, None),
        ({"wgrad_x": {"format": "E4M3", "headroom": 0.75}}, None),
    ],
)
def test_scales_within_a_contraction_keep_experts_in_the_loop(casts, why):
    """X of the second linear has no bound: its cast along the tokens has a scale for each column."""
    mine = read(
        config.Precision, {"schedule": [{"plan": {"layers.*.feed_forward.w*": "mine"}}], "recipes": {"mine": casts}}
    )
    decoder = Decoder(MOE, NORMS["mxnorm"], mine.settings, torch.bfloat16)
    apply_precision(decoder, mine, 0, "bf16", CUDA)
    assert {block.backend.name for block in decoder.layers} == {"reference" if why else "grouped"}
    assert all((why or "") in (block.backend.why or "") for block in decoder.layers)


@pytest.mark.parametrize(
    ("row", "changed", "compiled", "says"),
    [
        ("mxfp8", {"backend": "fused"}, False, "precision.backend: fused cannot run layers.0: its MLP is a MixtureOfE"),
        ("mxfp8", {"backend": "native"}, False, "precision.backend: native cannot run layers.0: "),
        ("mxfp8", {"backend": "reference"}, True, "train.compile: layers.0 computes its experts one after the other"),
    ],
)
def test_what_cannot_be_computed_is_refused(row, changed, compiled, says):
    with pytest.raises(ConfigError, match=says):
        build(MOE, "rmsnorm", row, CUDA, compiled, **changed)


def test_a_micro_batch_need_not_be_a_multiple_of_the_experts_blocks():
    """An expert's rows are filled up. Those of attention and of the shared experts are not."""
    experts = {"schedule": [{"plan": {"layers.*.feed_forward.w*": "mxfp8"}}]}
    model = Decoder(MOE, NORMS["rmsnorm"], plan("mxfp8").settings, torch.bfloat16)
    apply_precision(model, read(config.Precision, experts), 0, "bf16", CPU)
    check_tokens(model, "train.micro_batch_size: 80 tokens", 80)
    assert {mixture.align for mixture in mixtures_of(model).values()} == {32}
    apply_precision(model, plan("mxfp8"), 0, "bf16", CPU)
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size: 80 tokens do not divide into blocks of 32"):
        check_tokens(model, "train.micro_batch_size: 80 tokens", 80)


def test_blocks_that_are_filled_up_elsewhere_do_not_lie_in_two_experts():
    model = build(MOE, "rmsnorm", "mxfp8", pad_blocks=True, block_size=64)
    assert {mixture.align for mixture in mixtures_of(model).values()} == {64}


def test_every_linear_of_a_mixture_is_in_the_plan():
    model = build(MOE, "rmsnorm", "mxfp8")
    block = model.layers[0]
    assert len(linears_in(block)) == 6
    assert all(any(linear.gemms.casts()) for linear in linears_in(block))


@pytest.mark.parametrize(
    ("moe", "says"),
    [
        ({"num_experts": 0}, "moe.num_experts: must lie in 1 .. 4,096, not 0"),
        ({"num_experts": 10**12}, "moe.num_experts: must lie in 1 .. 4,096, not 1000000000000"),
        ({"num_experts": 4, "top_k": 5}, r"moe.top_k: must lie in 1 .. num_experts \(4\), not 5"),
        ({"num_shared": -1}, "moe.num_shared: must lie in 0 .. 4,096, not -1"),
        ({"num_shared": 5000}, "moe.num_shared: must lie in 0 .. 4,096, not 5000"),
        ({"balance": "loss", "bias_rate": 0.1}, "moe.bias_rate: only for balance=bias, not for loss"),
        ({"balance": "none", "loss_coefficient": 0.1}, "moe.loss_coefficient: only for balance=loss, not for none"),
        ({"bias_rate": 0.0}, "moe.bias_rate: must be positive"),
    ],
)
def test_what_a_mixture_cannot_be_is_refused(moe, says):
    sizes = {"hidden_size": 64, "ffn_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 128}
    with pytest.raises(ConfigError, match=says):
        read(config.Decoder, sizes | {"mlp": "moe", "moe": moe})


def test_experts_of_a_dense_mlp_are_refused():
    with pytest.raises(ConfigError, match="moe: swiglu has no experts; set mlp=moe"):
        replace(DENSE, moe=config.MoE(num_experts=4))


def test_shared_experts_are_refused_what_the_norm_that_they_read_cannot_have():
    """A gain that is folded into the forward's weight would be in its gradient twice."""
    casts = ("forward_x", "forward_w", "dgrad_dh", "dgrad_w", "wgrad_dh", "wgrad_x")
    recipe = {name: {"format": "E4M3"} for name in casts} | {"dgrad_w": {"format": "E4M3", "source": "forward"}}
    rows = {"layers.*": "mxfp8", "layers.*.shared.*": "mine"}
    mine = read(config.Precision, {"schedule": [{"plan": rows}], "recipes": {"mine": recipe}})
    decoder = Decoder(MOE, NORMS["mxnorm"], mine.settings, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"plan for layers\.0\.feed_forward\.shared\.w13: dgrad_w\.source: .* folded"):
        apply_precision(decoder, mine, 0, "bf16", CPU)
