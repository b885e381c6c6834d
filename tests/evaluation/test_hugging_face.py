"""Models go to and from transformers' own Llama."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_decoder import random_decoder

from mxstudy import config
from mxstudy.data.tokenizer import ByteTokenizer, Tokenizer
from mxstudy.evaluation.checkpoints import build, describe, identity, load
from mxstudy.evaluation.hugging_face import (
    ROPE,
    export,
    from_hugging_face,
    read_config,
    read_eos,
    read_state,
    to_hugging_face,
)
from mxstudy.model.decoder import Decoder
from mxstudy.numerics.cast import BlockCast
from mxstudy.reader import ConfigError

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = pytest.mark.integration
MODEL = config.Decoder(hidden_size=64, ffn_size=96, num_layers=3, num_heads=4, num_kv_heads=2, vocab_size=257)
RMSNORM = config.RMSNorm(eps=1e-5)
TOKENS = torch.randint(0, 257, (2, 32), generator=torch.Generator().manual_seed(0))


SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def theirs_of(scaling: config.Llama3RopeScaling) -> dict[str, float]:
    return {theirs: getattr(scaling, ours) for theirs, ours in ROPE.items()}


def decoder(norm: config.Norm = RMSNORM, model: config.Decoder = MODEL) -> Decoder:
    return random_decoder(model, norm, seed=3)


@torch.no_grad()
def test_transformers_computes_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = decoder()
    export(ours, RMSNORM, ByteTokenizer(), 128, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("na\u00efve text", add_special_tokens=False).input_ids == [*"na\u00efve text".encode()]
    assert tokenizer.eos_token_id == 256


LLAMA3 = config.Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=64)
THEIRS = {  # models that transformers makes, by architecture, with their settings other than the defaults
    "Llama 3.1": ("Llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", **theirs_of(LLAMA3)}}),
    "Llama 3.2, tied": (
        "Llama",
        {
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", **theirs_of(LLAMA3)},
            "tie_word_embeddings": True,
        },
    ),
    "Llama, wide heads": ("Llama", {"head_dim": 32}),
    "Llama, narrow heads": ("Llama", {"head_dim": 8}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2.5, tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Qwen3, heads of 128": ("Qwen3", {}),
}
OURS = {  # models of ours that have an architecture there
    "LlamaForCausalLM": MODEL,
    "LlamaForCausalLM, llama3": replace(MODEL, rope_scaling=LLAMA3),
    "LlamaForCausalLM, wide heads": replace(MODEL, head_dim=48),
    "Qwen2ForCausalLM": replace(MODEL, qkv_bias=True),
    "Qwen3ForCausalLM": replace(MODEL, qk_norm=True, qk_norm_by_head=True, head_dim=32),
}


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_what_transformers_makes_is_read_exactly(name: str, tmp_path: Path) -> None:
    import transformers

    kind, settings = THEIRS[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(
        **SHAPE, max_position_embeddings=512, initializer_range=0.1, **settings
    )
    theirs = getattr(transformers, f"{kind}ForCausalLM")(made).float().eval()
    for parameter in theirs.parameters():  # otherwise biases are 0 and gains 1
        if parameter.dim() == 1:
            parameter += 0.3 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "hf")
    model, norm, _ = read_config(tmp_path / "hf")
    ours = Decoder(model, norm, BlockCast(), torch.float32)
    ours.load_state_dict(from_hugging_face(read_state(tmp_path / "hf"), model))
    tokens = torch.randint(0, 99, (2, 300))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_transformers_computes_what_ours_do(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = decoder(model=OURS[name])
    export(ours, RMSNORM, ByteTokenizer(), 512, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert type(theirs).__name__ == name.split(",")[0]
    tokens = torch.randint(0, 257, (2, 300), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_they_are_asked_in_mx_formats_and_another_norm_too(name: str, tmp_path: Path) -> None:
    export(decoder(model=OURS[name]), RMSNORM, ByteTokenizer(), 512, tmp_path / "hf")
    exact = describe(tmp_path / "hf")
    plan = config.Precision(schedule=(config.PrecisionRow(plan={"layers.*": "mxfp8"}),))
    cast = replace(exact, norm=config.MXNorm(p=2.0), precision=plan)
    models = [load(tmp_path / "hf", one, torch.device("cpu")) for one in (exact, cast)]
    assert models[1].layers[0].fused is not None
    theirs, ours = (model(TOKENS).float() for model in models)
    assert 1e-3 < (ours - theirs).abs().mean() < 0.1 * theirs.std()


@torch.no_grad()
def test_a_head_is_the_embedding_only_if_the_config_says_so(tmp_path: Path) -> None:
    export(decoder(), RMSNORM, ByteTokenizer(), 128, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    state = read_state(tmp_path / "hf")  # has a head, which transformers does not read either
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    with pytest.raises(ConfigError, match=r"lm_head\.weight is missing"):
        from_hugging_face({key: value for key, value in state.items() if key != "lm_head.weight"}, MODEL)


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_there_and_back_is_the_same_model(name: str, tmp_path: Path) -> None:
    ours = decoder(model=OURS[name])
    export(ours, RMSNORM, ByteTokenizer(), 128, tmp_path / "hf")
    model, norm, length = read_config(tmp_path / "hf")
    assert (model, norm, length) == (OURS[name], RMSNORM, 128)
    back = Decoder(model, norm, BlockCast(), torch.float32)
    back.load_state_dict(from_hugging_face(read_state(tmp_path / "hf"), model))
    assert torch.equal(back(TOKENS), ours(TOKENS))


BESIDE = {  # rotary embeddings that somebody adds to a config.json which has rope_parameters, and their base
    "its own base": ({"rope_scaling": {"rope_type": "llama3", "rope_theta": 2e4, **theirs_of(LLAMA3)}}, 2e4),
    "a base beside it": (
        {"rope_theta": 3e4, "rope_scaling": {"rope_type": "llama3", **theirs_of(LLAMA3)}},
        3e4,
    ),
    "the default base": ({"rope_scaling": {"type": "llama3", **theirs_of(LLAMA3)}}, 1e4),
}


@pytest.mark.parametrize("name", BESIDE)
@torch.no_grad()
def test_rope_scaling_is_read_before_rope_parameters_as_transformers_does(name: str, tmp_path: Path) -> None:
    """It replaces them as a whole, so that their rope_theta does not count either."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    changes, base = BESIDE[name]
    made = LlamaConfig(**SHAPE, initializer_range=0.1, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    LlamaForCausalLM(made).save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    model, norm, _ = read_config(tmp_path / "hf")
    assert (model.rope_scaling, model.rope_theta) == (LLAMA3, base)
    ours = Decoder(model, norm, BlockCast(), torch.float32)
    ours.load_state_dict(from_hugging_face(read_state(tmp_path / "hf"), model))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens = torch.randint(0, 99, (2, 300), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_what_transformers_wrote_is_read(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=99, rms_norm_eps=1e-6, tie_word_embeddings=True))
    theirs.save_pretrained(tmp_path / "hf")
    model, norm, _ = read_config(tmp_path / "hf")
    assert (model.num_kv_heads, norm.eps) == (4, 1e-6)
    ours = Decoder(model, norm, BlockCast(), torch.float32)
    ours.load_state_dict(from_hugging_face(read_state(tmp_path / "hf"), model))
    tokens = TOKENS % 99
    torch.testing.assert_close(ours(tokens), theirs.float()(tokens).logits, atol=1e-5, rtol=1e-5)


def test_weights_may_be_bf16(tmp_path: Path) -> None:
    export(decoder(), RMSNORM, ByteTokenizer(), 128, tmp_path / "hf", dtype="bfloat16")
    assert {tensor.dtype for tensor in read_state(tmp_path / "hf").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("model", "norm", "says"),
    [
        (replace(MODEL, mlp="gelu"), RMSNORM, "model.mlp: Llama and Qwen have swiglu, not gelu"),
        (replace(MODEL, qk_norm=True), RMSNORM, "model: none of LlamaForCausalLM, .* has just qk_norm; it cannot"),
        (replace(MODEL, qk_norm=True, qk_norm_by_head=True, qkv_bias=True), RMSNORM, "has just qkv_bias, qk_norm, qk_"),
        (MODEL, config.LayerNorm(), "norm: Llama has no LayerNorm"),
    ],
)
def test_what_is_no_llama_is_refused(model: config.Decoder, norm: config.Norm, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        export(decoder(norm, model), norm, ByteTokenizer(), 128, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already; give a new folder"):
        export(decoder(), RMSNORM, ByteTokenizer(), 128, tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "is GPT2LMHeadModel; only LlamaForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary embedding 'yarn'; only default and llama3 can be read"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary embedding 'yarn'; only default and llama3"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "llama3 has no low_freq_factor, high_freq_factor",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5; only 1.0 can be read"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only 'silu'"),
        ({"mlp_bias": True}, "mlp_bias True; only False can be read"),
        ({"attention_bias": True}, "attention_bias True; only False can be read"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types sliding_attention; only full_attention",
        ),
        ({"head_dim": 15}, r"config\.json: head_dim: must be positive and even, not 15"),
        ({"hidden_size": "64"}, r"config\.json: hidden_size: '64' is not an integer"),
        ({"num_attention_heads": 0}, r"config\.json: num_heads: must lie in 1 .. 4,096, not 0"),
    ],
)
def test_another_architecture_is_refused(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    export(decoder(), RMSNORM, ByteTokenizer(), 128, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=says):
        read_config(tmp_path / "hf")


@pytest.mark.parametrize(("key", "value"), [("num_key_value_heads", 4), ("head_dim", 16)])
def test_null_is_what_transformers_takes_it_for(key: str, value: int, tmp_path: Path) -> None:
    from transformers import AutoConfig

    export(decoder(model=replace(MODEL, num_kv_heads=4)), RMSNORM, ByteTokenizer(), 128, tmp_path / "hf")
    model, path = read_config(tmp_path / "hf")[0], tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: None}))
    assert read_config(tmp_path / "hf")[0] == model
    assert getattr(AutoConfig.from_pretrained(tmp_path / "hf"), key) == value


@pytest.mark.parametrize(("architecture", "refused"), [("LlamaForCausalLM", False), ("Qwen2ForCausalLM", True)])
def test_no_number_of_keys_and_values_is_what_transformers_takes_it_for(
    architecture: str, refused: bool, tmp_path: Path
) -> None:
    """A Qwen without the key has 32 of them there, whatever its heads are; it is refused here."""
    export(decoder(model=replace(MODEL, num_kv_heads=4)), RMSNORM, ByteTokenizer(), 128, tmp_path / "hf")
    model, path = read_config(tmp_path / "hf")[0], tmp_path / "hf" / "config.json"
    values = json.loads(path.read_text()) | {"architectures": [architecture]}
    path.write_text(json.dumps({key: value for key, value in values.items() if key != "num_key_value_heads"}))
    if refused:
        with pytest.raises(ConfigError, match="has no num_key_value_heads"):
            read_config(tmp_path / "hf")
    else:
        assert read_config(tmp_path / "hf")[0] == model


@pytest.mark.parametrize("key", ["rms_norm_eps", "num_attention_heads", "max_position_embeddings"])
def test_a_config_without_a_key_is_refused(key: str, tmp_path: Path) -> None:
    export(decoder(), RMSNORM, ByteTokenizer(), 128, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != key}))
    with pytest.raises(ConfigError, match=rf"^checkpoint: .*config\.json has no {key}"):
        read_config(tmp_path / "hf")
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"^checkpoint: .*config\.json: cannot be read"):
        read_config(tmp_path / "hf")


@pytest.mark.parametrize(
    ("named", "ids", "eos"),
    [
        ("<stop>", 256, "<stop>"),
        ({"content": "<stop>", "lstrip": False}, None, "<stop>"),
        (None, 257, "<stop>"),
        (None, [257, 256], "<stop>"),
        (None, None, None),
    ],
)
def test_the_token_that_ends_a_document_is_the_one_it_names(
    named: object, ids: object, eos: str | None, tmp_path: Path
) -> None:
    backend = ByteTokenizer().backend
    backend.add_special_tokens(["<stop>"])
    export(decoder(model=replace(MODEL, vocab_size=258)), RMSNORM, Tokenizer(backend), 128, tmp_path / "hf")
    for name, key, value in (("tokenizer_config", "eos_token", named), ("config", "eos_token_id", ids)):
        path = tmp_path / "hf" / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert read_eos(tmp_path / "hf") == eos
    assert describe(tmp_path / "hf").tokenizer.eos_token == (eos or "<|endoftext|>")


def test_an_edited_config_or_tokenizer_is_another_model(tmp_path: Path) -> None:
    export(decoder(), RMSNORM, ByteTokenizer(), 128, tmp_path / "hf")
    seen = [identity(tmp_path / "hf")]
    assert identity(tmp_path / "hf") == seen[0]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        path = tmp_path / "hf" / name
        path.write_text(path.read_text() + "\n")
        seen.append(identity(tmp_path / "hf"))
    assert len({json.dumps(one) for one in seen}) == 4


def test_files_of_weights_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    export(decoder(), RMSNORM, ByteTokenizer(), 128, tmp_path / "hf")
    config_path, weights = tmp_path / "hf/config.json", tmp_path / "hf/model.safetensors"
    values = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(values | {"intermediate_size": 128}))
    with pytest.raises(ConfigError, match=r"w13\.weight of hf is \(192, 64\), but \(256, 64\) by its config$"):
        build(describe(tmp_path / "hf"), torch.device("cpu"))
    config_path.write_text(json.dumps(values | {"num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"model\.layers\.3\..* is missing"):
        describe(tmp_path / "hf")
    config_path.write_text(json.dumps(values))
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ConfigError, match=r"^checkpoint: .*model\.safetensors is truncated or unreadable: .+$"):
        describe(tmp_path / "hf")


def test_tensors_that_are_missing_or_left_over_are_named(tmp_path: Path) -> None:
    state = to_hugging_face(decoder())
    with pytest.raises(ConfigError, match=r"has unknown tensors extra\.weight"):
        from_hugging_face(state | {"extra.weight": torch.zeros(1)}, MODEL)
    narrow = {"model.layers.1.mlp.up_proj.weight": torch.zeros(96, 32)}
    with pytest.raises(ConfigError, match=r"up_proj\.weight of layer 1 have rows of different sizes"):
        from_hugging_face(state | narrow, MODEL)
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        from_hugging_face(state, MODEL)
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        read_state(tmp_path)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path)
