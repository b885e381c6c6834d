import math
from dataclasses import replace

import pytest
import torch
from each import each

from mxstudy import config
from mxstudy.config.conf_folders import CONF
from mxstudy.model import Decoder, LayerNorm, MXNorm, PostRoundMXNorm, RMSNorm
from mxstudy.model.decoder import Tree
from mxstudy.numerics import BlockCast
from mxstudy.reader import ConfigError, read

SMALL = config.Decoder(hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=50)


def build(model=SMALL, norm=None, compute=torch.float32, seed=0):
    decoder = Decoder(model, norm or config.RMSNorm(), BlockCast(), compute)
    decoder.init_weights(seed)
    return decoder


def reference(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Compute the same network in float64, with complex rotations, an explicit mask and a loop over heads."""
    model, weights = decoder.config, {name: weight.detach().double() for name, weight in decoder.named_parameters()}
    size = model.hidden_size // model.num_heads
    group = model.num_heads // model.num_kv_heads

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[name]

    def rotated(x_TH):
        angles = torch.outer(
            torch.arange(len(x_TH)), model.rope_theta ** (-2 * torch.arange(size // 2) / size)
        ).double()
        pairs = torch.complex(x_TH[:, : size // 2], x_TH[:, size // 2 :]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    def attention(x_TD, name):
        qkv = norm(x_TD, f"{name}.wqkv.norm.weight") @ weights[f"{name}.wqkv.weight"].T
        heads = qkv.split(size, dim=-1)
        mask = torch.full((len(x_TD), len(x_TD)), -math.inf, dtype=torch.float64).triu(1)
        outputs = []
        for n in range(model.num_heads):
            q = rotated(heads[n])
            k = rotated(heads[model.num_heads + n // group])
            v = heads[model.num_heads + model.num_kv_heads + n // group]
            outputs.append(torch.softmax(q @ k.T / math.sqrt(size) + mask, dim=-1) @ v)
        return torch.cat(outputs, dim=-1) @ weights[f"{name}.wo.weight"].T

    def feed_forward(x_TD, name):
        gate, up = (norm(x_TD, f"{name}.w13.norm.weight") @ weights[f"{name}.w13.weight"].T).chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up) @ weights[f"{name}.w2.weight"].T

    rows = []
    for sequence in tokens:
        x = weights["tok_embeddings.weight"][sequence]
        for i in range(model.num_layers):
            x = x + attention(x, f"layers.{i}.attention")
            x = x + feed_forward(x, f"layers.{i}.feed_forward")
        rows.append(norm(x, "norm.weight") @ weights["output.weight"].T)
    return torch.stack(rows)


def test_the_forward_is_that_of_the_network_written_out():
    decoder = build()
    with torch.no_grad():
        for norm in (m for n, m in decoder.named_parameters() if n.endswith("norm.weight")):
            norm.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(norm.numel()))
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(decoder(tokens).double(), reference(decoder, tokens), atol=2e-5)


def test_the_gradient_of_a_token_that_is_often_there_is_summed_in_fp32():
    """A bf16 sum hardly moves any more once it is 256 times what is added."""
    decoder, rows = build(compute=torch.bfloat16), []

    def keep(module, inputs):
        inputs[0].register_hook(rows.append)

    tokens = torch.randint(0, 3, (16, 256), generator=torch.Generator().manual_seed(0))
    decoder.layers[0].register_forward_pre_hook(keep)
    decoder(tokens).float().logsumexp(-1).mean().backward()
    exact = torch.zeros(50, 64, dtype=torch.float64).index_add_(0, tokens.flatten(), rows[0].double().flatten(0, 1))
    error = (decoder.tok_embeddings.weight.grad - exact).norm() / exact.norm()
    assert error < 1e-5


def test_logits_do_not_depend_on_later_tokens():
    decoder = build()
    tokens = torch.randint(0, 50, (1, 16), generator=torch.Generator().manual_seed(2))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 50
    with torch.no_grad():
        before, after = decoder(tokens)[0], decoder(changed)[0]
    assert torch.allclose(before[:10], after[:10], atol=1e-6)
    assert not torch.allclose(before[10:], after[10:], atol=1e-3)


@torch.no_grad()
def test_a_tree_is_each_of_its_branches_alone():
    """After five tokens there are two ends, of three tokens and of two, then a token of padding, which reads itself."""
    decoder = build(replace(SMALL, init="mitchell"))
    tokens = torch.randint(0, 50, (1, 11), generator=torch.Generator().manual_seed(4))
    positions = torch.tensor([[*range(5), *(5, 6, 7), *(5, 6), 0]])
    branches = torch.tensor([0] * 5 + [1] * 3 + [2] * 2 + [3])
    mask = torch.tensor([[j <= i and branches[j] in (0, branches[i]) for j in range(11)] for i in range(11)])
    mask[10, :10] = False
    features = decoder.features(tokens, Tree(positions, mask[None]))
    assert features.isfinite().all()
    for branch in ([5, 6, 7], [8, 9]):
        places = [*range(5), *branch]
        assert torch.allclose(features[:, places], decoder.features(tokens[:, places]), atol=1e-5)
    assert not torch.allclose(features[:, :10], decoder.features(tokens[:, :10]), atol=1e-2)


@each(
    ("name", "total", "blocks"),
    [  # Llama 3 sizes of the MXNorm paper: parameters in all, and without embedding, head and final norm
        ("llama_125m", 384e6, 121.7e6),
        ("llama_250m", 506e6, 243.3e6),
        ("llama_1b", 1.50e9, 973e6),
        ("llama_8b", 8.03e9, 6.98e9),
    ],
)
def test_the_papers_sizes(name, total, blocks):
    import yaml

    values = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    values.pop("defaults")
    model = read(config.Decoder, values)
    with torch.device("meta"):
        decoder = Decoder(model, config.RMSNorm(), BlockCast(), torch.bfloat16)
    assert decoder.num_params() == pytest.approx(total, rel=3e-3)
    assert sum(p.numel() for p in decoder.layers.parameters()) == pytest.approx(blocks, rel=3e-3)


@each("norm", [RMSNorm(256), LayerNorm(256, bias=True), MXNorm(256, p=2.0), PostRoundMXNorm(256)])
def test_a_new_norm_has_gain_1_and_bias_0(norm):
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(norm(x), norm.apply_affine(x, torch.ones(256), None))


@each("settings", [SMALL, replace(SMALL, mlp="moe", qkv_bias=True, moe=config.MoE(num_experts=4, balance="bias"))])
def test_a_new_decoder_is_drawn_as_a_run_draws_it_but_by_torchs_generator(settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        new, other = (Decoder(settings, config.RMSNorm(), BlockCast(), torch.float32) for _ in range(2))
    drawn = build(settings).state_dict()
    for name, weight in new.state_dict().items():
        if drawn[name].std() == 0:  # a gain or a bias
            assert torch.equal(weight, drawn[name]), name
            continue
        assert not torch.equal(weight, other.state_dict()[name]), name
        rows, expected = weight.chunk(2, dim=-2), drawn[name].chunk(2, dim=-2)  # halves of w13 differ
        for half, of in zip(rows, expected, strict=True):
            assert half.std().item() == pytest.approx(of.std().item(), rel=0.2), name


def test_building_on_meta_draws_nothing():
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        Decoder(SMALL, config.RMSNorm(), BlockCast(), torch.float32)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_initial_weights_depend_on_seed_and_name_alone():
    first, same, other = build(), build(norm=config.MXNorm(p=1.0), compute=torch.bfloat16), build(seed=1)
    deeper = dict(build(replace(SMALL, num_layers=3)).named_parameters())
    for name, weight in first.named_parameters():
        assert torch.equal(weight, dict(same.named_parameters())[name])
        assert torch.equal(weight, deeper[name])
        assert torch.equal(weight, dict(other.named_parameters())[name]) == name.endswith("norm.weight")


def test_initialisation_scales_with_depth():
    """As in `init_weights` of TorchTitan's torchtitan/models/llama3, w2 and w3 are shrunk, and w1 is not."""
    decoder = build(replace(SMALL, hidden_size=256, ffn_size=512))
    weights = {name: weight.std().item() for name, weight in decoder.named_parameters() if weight.ndim == 2}
    shrink = 0.9866  # the std of a normal distribution cut at 3 sigma
    assert weights["tok_embeddings.weight"] == pytest.approx(shrink, rel=0.02)
    assert weights["output.weight"] == pytest.approx(shrink / 16, rel=0.02)
    for i in range(2):
        assert weights[f"layers.{i}.attention.wqkv.weight"] == pytest.approx(shrink * 0.02, rel=0.02)
        gate, up = decoder.layers[i].feed_forward.w13.weight.chunk(2)
        assert gate.std().item() == pytest.approx(shrink * 0.02, rel=0.02)
        expected = shrink * 0.02 / math.sqrt(2 * (i + 1))
        assert up.std().item() == pytest.approx(expected, rel=0.02)
        for name in ("attention.wo", "feed_forward.w2"):
            assert weights[f"layers.{i}.{name}.weight"] == pytest.approx(expected, rel=0.02)


def test_watchers_see_every_norms_input_and_change_nothing():
    decoder = build(norm=config.MXNorm(p=2.0))
    tokens = torch.randint(0, 50, (1, 32), generator=torch.Generator().manual_seed(3))
    expected, seen = decoder(tokens), {}
    decoder.watchers = (lambda name, module, x: seen.update({name: x}),)
    assert torch.equal(decoder(tokens), expected)
    names = [f"layers.{i}.{kind}" for i in range(2) for kind in ("attention_norm", "ffn_norm")]
    assert list(seen) == [*names, "norm"]
    block, embedded = decoder.layers[0], decoder.tok_embeddings(tokens)
    assert torch.equal(seen["layers.0.attention_norm"], embedded)
    attended = embedded + block.attention(embedded, decoder.rope(32, tokens.device))[0]
    assert torch.equal(seen["layers.0.ffn_norm"], attended)
    assert not any(x.requires_grad for x in seen.values())


def test_a_hidden_size_that_the_block_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="hidden_size: 48 does not divide into blocks of 32"):
        build(replace(SMALL, hidden_size=48), norm=config.MXNorm(p=2.0))
