"""The decoder's other rows work: LayerNorm, QK-norm, ungated MLPs, mitchell, and the sizes in conf."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from composing import compose_job, validated
from each import each

from mxstudy import config
from mxstudy.model import Decoder, LayerNorm, RMSNorm
from mxstudy.model.precision import apply_precision
from mxstudy.numerics import BlockCast
from mxstudy.reader import ConfigError

OLMO = config.Decoder(
    hidden_size=64,
    ffn_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=64,
    mlp="gelu",
    qk_norm=True,
    init="mitchell",
)
LAYERNORM = config.LayerNorm()
TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
every_mlp = each("mlp", ["swiglu", "gelu", "relu2"])


def build(model=OLMO, norm=LAYERNORM, compute=torch.float32, seed=0):
    decoder = Decoder(model, norm, BlockCast(), compute)
    decoder.init_weights(seed)
    return decoder


def scatter_norms(decoder: Decoder) -> None:
    """Draw gains around 1 and biases around 0, so that each of them matters."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


def reference(decoder: Decoder, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Compute the network in float64 by torch's own functions, with 2 x 2 rotations, and heads one by one."""
    model, length = decoder.config, tokens_BT.shape[1]
    weights = {name: weight.detach().double() for name, weight in decoder.named_parameters()}
    size = model.hidden_size // model.num_heads
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def norm(x, name):
        gain, shape = weights.get(f"{name}.weight"), x.shape[-1:]
        if isinstance(decoder.norm, LayerNorm):
            return F.layer_norm(x, shape, gain, weights.get(f"{name}.bias"), eps=1e-5)
        return F.rms_norm(x, shape, gain, eps=1e-5)

    def rotated(x_BTH):
        turned = torch.empty_like(x_BTH)
        for t in range(length):
            for i in range(size // 2):
                angle = t * model.rope_theta ** (-2 * i / size)
                a, b = x_BTH[:, t, i], x_BTH[:, t, i + size // 2]
                turned[:, t, i] = a * math.cos(angle) - b * math.sin(angle)
                turned[:, t, i + size // 2] = a * math.sin(angle) + b * math.cos(angle)
        return turned

    def attention(x, name):
        qkv = norm(x, f"{name}.wqkv.norm") @ weights[f"{name}.wqkv.weight"].T
        kv_size = model.num_kv_heads * size
        q, k, v = qkv.split([model.hidden_size, kv_size, kv_size], dim=-1)
        if model.qk_norm:
            q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        heads = []
        for n in range(model.num_heads):
            group = n // (model.num_heads // model.num_kv_heads)
            q_n, (k_n, v_n) = q.split(size, -1)[n], (y.split(size, -1)[group] for y in (k, v))
            scores = rotated(q_n) @ rotated(k_n).transpose(1, 2) / math.sqrt(size)
            heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v_n)
        return torch.cat(heads, dim=-1) @ weights[f"{name}.wo.weight"].T

    def mlp(x, name):
        up = "w13" if model.mlp == "swiglu" else "w1"
        y = norm(x, f"{name}.{up}.norm") @ weights[f"{name}.{up}.weight"].T
        if model.mlp == "swiglu":
            y = F.silu(y[..., : model.ffn_size]) * y[..., model.ffn_size :]
        elif model.mlp == "gelu":
            y = y * (1 + torch.erf(y / math.sqrt(2))) / 2
        else:
            y = torch.where(y > 0, y * y, 0)
        return y @ weights[f"{name}.w2.weight"].T

    x = weights["tok_embeddings.weight"][tokens_BT]
    for i in range(model.num_layers):
        x = x + attention(x, f"layers.{i}.attention")
        x = x + mlp(x, f"layers.{i}.feed_forward")
    return norm(x, "norm") @ weights["output.weight"].T


@every_mlp
@pytest.mark.integration
@each("qk_norm", [True, False], ids=["qk_norm", "no_qk_norm"])
@each(
    "norm",
    [LAYERNORM, config.LayerNorm(bias=True), config.LayerNorm(affine=False), config.RMSNorm()],
    ids=["layernorm", "bias", "affine_off", "rmsnorm"],
)
def test_the_forward_is_that_of_the_network_written_out(mlp, qk_norm, norm):
    decoder = build(replace(OLMO, mlp=mlp, qk_norm=qk_norm), norm)
    scatter_norms(decoder)
    want = reference(decoder, TOKENS)
    assert want.std() > 0.1
    assert torch.allclose(decoder(TOKENS).double(), want, atol=2e-5)


def test_norms_on_their_own_are_exact_and_of_the_blocks_family():
    for norm, kind in ((LAYERNORM, LayerNorm), (config.RMSNorm(), RMSNorm), (config.MXNorm(p=2.0), RMSNorm)):
        decoder = build(norm=norm)
        attention = decoder.layers[0].attention
        assert {type(n) for n in (decoder.norm, attention.q_norm, attention.k_norm)} == {kind}


def test_affine_off_leaves_no_gain_anywhere():
    decoder = build(norm=config.LayerNorm(affine=False))
    assert not [name for name, _ in decoder.named_parameters() if "norm" in name]


@pytest.mark.integration
@every_mlp
@pytest.mark.parametrize("norm", [config.LayerNorm(bias=True), config.MXNorm(p=2.0)], ids=["layernorm", "mxnorm"])
def test_a_few_steps_in_mxfp8_learn_a_batch_by_heart(mlp, norm):
    decoder = build(replace(OLMO, mlp=mlp), norm, torch.bfloat16)
    plan = config.Precision(schedule=(config.PrecisionRow(plan={"*": "mxfp8"}),))
    apply_precision(decoder, plan, 0, "bf16", torch.device("cpu"))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(decoder(TOKENS[:, :16]).float().flatten(0, 1), TOKENS.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())
        assert all(p.grad.abs().sum() > 0 for p in decoder.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


# --------------------------------------------------------------------------------------------------- initialisation


def test_mitchell_follows_the_fan_in_and_the_depth():
    """OLMo has 1 / sqrt(fan-in), divided by sqrt(2 (layer + 1)) for the residual outputs, cut at 3 sigma."""
    model = replace(OLMO, hidden_size=256, ffn_size=512, vocab_size=1024)
    parameters = dict(build(model).named_parameters())
    shrink, width = 0.9866, 1 / 16
    expected = {"tok_embeddings": width, "output": width}
    for i in range(2):
        depth = math.sqrt(2 * (i + 1))
        expected |= {f"layers.{i}.attention.wqkv": width, f"layers.{i}.feed_forward.w1": width}
        expected |= {
            f"layers.{i}.attention.wo": width / depth,
            f"layers.{i}.feed_forward.w2": 1 / math.sqrt(512) / depth,
        }
    for name, std in expected.items():
        weight = parameters[f"{name}.weight"]
        assert weight.std().item() == pytest.approx(shrink * std, rel=0.02), name
        assert 2.7 * std < weight.abs().max() <= 3 * std, name
    assert len(expected) == sum(weight.ndim == 2 for weight in parameters.values())


def test_initial_weights_depend_on_seed_and_name_alone_over_mlps_and_norms_too():
    first = dict(build().named_parameters())
    for other in (
        build(norm=config.MXNorm(p=1.0)),
        build(replace(OLMO, qk_norm=False)),
        build(replace(OLMO, mlp="relu2")),
    ):
        for name, weight in other.named_parameters():
            assert torch.equal(weight, first[name])


def test_a_bias_starts_at_zero_and_changes_no_other_weight():
    biased, plain = (dict(build(replace(OLMO, qkv_bias=on)).named_parameters()) for on in (True, False))
    for i in range(OLMO.num_layers):
        assert torch.equal(biased.pop(f"layers.{i}.attention.qkv_bias"), torch.zeros(128))
    assert biased.keys() == plain.keys()
    assert all(torch.equal(biased[name], weight) for name, weight in plain.items())


@each(
    ("changed", "says"),
    [
        ({"head_dim": 7}, "head_dim: must be positive and even, not 7"),
        ({"head_dim": 0}, "head_dim: must be positive and even, not 0"),
        (
            {"qk_norm": False, "qk_norm_by_head": True},
            "qk_norm_by_head: has no effect without qk_norm",
        ),
    ],
)
def test_attention_that_cannot_be_is_refused(changed, says):
    with pytest.raises(ConfigError, match=says):
        replace(OLMO, **changed)


@each(
    ("changed", "says"),
    [
        ({"factor": 0.0}, "factor: must be positive, not 0.0"),
        ({"high_freq_factor": 1.0}, "high_freq_factor: must be above low_freq_factor, 1.0, not 1.0"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(changed, says):
    fields = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192} | changed
    with pytest.raises(ConfigError, match=says):
        config.Llama3RopeScaling(**fields)


def test_an_init_std_that_mitchell_would_pass_over_is_refused():
    with pytest.raises(ConfigError, match="init_std: mitchell initialisation sets it from the fan-in"):
        replace(OLMO, init_std=0.01)


# ---------------------------------------------------------------------------------------------------------- counts


@each(("mlp", "matrices"), [("swiglu", 3), ("gelu", 2), ("relu2", 2)])
def test_flops_per_token_are_counted_from_the_modules(mlp, matrices):
    """FLOPs are 6 per matmul parameter without the input embedding, plus the attention.

    The attention has 6 x layers x heads x head size x sequence.
    """
    decoder = build(replace(OLMO, mlp=mlp, vocab_size=50))
    matmul = 2 * (64 * (4 + 2 * 2) * 16 + 64 * 64 + matrices * 64 * 128) + 64 * 50
    assert decoder.num_matmul_params() == matmul
    assert decoder.flops_per_token(128) == 6 * matmul + 6 * 2 * 4 * 16 * 128
    gains = 2 * (2 * 64 + 64 + 32) + 64  # per block two fused norms, and those of queries and keys; the final norm
    assert decoder.num_params() == matmul + 50 * 64 + gains


def test_heads_of_another_size_are_counted():
    wide = build(replace(OLMO, head_dim=32))
    matmul = 2 * (64 * (4 + 2 * 2) * 32 + 4 * 32 * 64 + 2 * 64 * 128) + 64 * 64
    assert wide.num_matmul_params() == matmul
    assert wide.flops_per_token(128) == 6 * matmul + 6 * 2 * 4 * 32 * 128


def conf_model(*overrides: str) -> config.Decoder:
    return validated(compose_job("+experiment=quickstart", *overrides)).model


def counted(model: config.Decoder, norm: config.Norm) -> int:
    with torch.device("meta"):
        return Decoder(model, norm, BlockCast(), torch.bfloat16).num_params()


@pytest.mark.integration
@pytest.mark.parametrize(("n", "parameters"), [(4, 19_534_080), (9, 72_717_120), (32, 1_741_948_928)])
def test_the_sizes_of_the_instability_paper(n, parameters):
    """N counts embedding and head, 12 d^2 per layer, and every gain: 4 d per layer and the final d."""
    model = conf_model("model=olmo", f"model.num_heads={n}")
    assert (model.num_layers, model.num_heads, model.num_kv_heads) == (n, n, n)
    assert (model.hidden_size, model.ffn_size) == (64 * n, 256 * n)
    assert counted(model, LAYERNORM) == parameters


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "shape", "heads", "blocks"),
    [  # table 2 of the MXFP8 recipe: layers and width; heads; millions of parameters without embedding and head
        ("nemotron_843m", (24, 1024), (16, 16), 302.1),
        ("nemotron_2b", (24, 2048), (16, 16), 1208.2),
        ("nemotron_8b", (32, 4096), (32, 8), 5637.7),
    ],
)
def test_the_sizes_of_the_mxfp8_recipe(name, shape, heads, blocks):
    model = conf_model(f"model={name}")
    assert (model.num_layers, model.hidden_size) == shape
    assert (model.num_heads, model.num_kv_heads) == heads
    assert (model.mlp, model.ffn_size) == ("relu2", 4 * model.hidden_size)
    nominal = {"nemotron_843m": 843e6, "nemotron_2b": 2.26e9, "nemotron_8b": 7.73e9}[name]
    total = counted(model, config.LayerNorm(bias=True))
    assert total == pytest.approx(nominal, rel=0.02)
    assert (total - 2 * 256_000 * model.hidden_size) / 1e6 == pytest.approx(blocks, abs=0.1)


# -------------------------------------------------------------------------------------------------------- watchers


def test_watchers_see_the_norms_of_queries_and_keys_and_change_nothing():
    decoder = build()
    expected, seen = decoder(TOKENS), {}
    decoder.watchers = (lambda name, module, x: seen.update({name: (module, x)}),)
    assert torch.equal(decoder(TOKENS), expected)
    kinds = ("attention_norm", "attention.q_norm", "attention.k_norm", "ffn_norm")
    assert list(seen) == [*(f"layers.{i}.{kind}" for i in range(2) for kind in kinds), "norm"]
    block = decoder.layers[1]
    fused, x = seen["layers.1.attention_norm"]
    assert fused is block.attention.wqkv
    q, k, _ = fused(x).split([64, 32, 32], dim=-1)
    for name, want in (("q_norm", q), ("k_norm", k)):
        module, found = seen[f"layers.1.attention.{name}"]
        assert module is getattr(block.attention, name)
        assert torch.equal(found, want)
    assert seen["layers.1.ffn_norm"][0] is block.feed_forward.w1
    assert not any(x.requires_grad for _, x in seen.values())


@pytest.mark.slow
def test_compiled_blocks_agree_with_eager_ones_and_are_the_same_with_watchers():
    torch._dynamo.reset()
    plan = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": "mxfp8"}),))
    decoder = build(replace(OLMO, num_layers=1))
    apply_precision(decoder, plan, 0, "fp32", torch.device("cpu"))

    def logits_and_gradients():
        decoder.zero_grad()
        logits = decoder(TOKENS)
        F.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten()).backward()
        return [logits.detach(), *(p.grad.clone() for p in decoder.parameters())]

    eager = logits_and_gradients()
    decoder.layers[0].compile(fullgraph=True)
    compiled = logits_and_gradients()
    decoder.watchers = (lambda name, module, x: x.sum(),)
    for one, other, watched in zip(eager, compiled, logits_and_gradients(), strict=True):
        assert (one - other).norm() < 1e-2 * one.norm()
        assert torch.equal(other, watched)
