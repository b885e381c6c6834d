"""Against transformers' own Llama, both ways."""

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
from mxstudy.evaluation.checkpoints import build, describe, identity
from mxstudy.evaluation.hugging_face import (
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


@torch.no_grad()
def test_there_and_back_is_the_same_model(tmp_path: Path) -> None:
    ours = decoder()
    export(ours, RMSNORM, ByteTokenizer(), 128, tmp_path / "hf")
    model, norm, length = read_config(tmp_path / "hf")
    assert (model, norm, length) == (MODEL, RMSNORM, 128)
    back = Decoder(model, norm, BlockCast(), torch.float32)
    back.load_state_dict(from_hugging_face(read_state(tmp_path / "hf"), model))
    assert torch.equal(back(TOKENS), ours(TOKENS))


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
        (replace(MODEL, mlp="gelu"), RMSNORM, "model.mlp: a Llama has swiglu, not gelu"),
        (replace(MODEL, qk_norm=True), RMSNORM, "model.qk_norm: a Llama has False, not True"),
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
        ({"rope_parameters": {"rope_type": "llama3"}}, "rotary embedding 'llama3'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; only silu"),
        ({"mlp_bias": True}, "mlp_bias; only linears without bias"),
        ({"head_dim": 32}, "head_dim 32; only hidden_size / heads, 16"),
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
