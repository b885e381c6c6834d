"""Convert a native Llama, Qwen2 or Qwen3 to Hugging Face's format and back: same tensors, fused linears split.

An RMSNorm model stays the same function. Hugging Face's models divide by the exact RMS and cast nothing, so an MXNorm
or quantised model becomes a different function. What a config asks for that our decoder does not have is refused.
A mixture of experts is written, not read (`mxstudy.evaluation.hugging_face_moe`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mxstudy import config
from mxstudy.data.tokenizer import Tokenizer, find_pretrained
from mxstudy.evaluation.hugging_face_moe import KEEPS_FP32, settings_of, tensors_of
from mxstudy.model.decoder import Decoder
from mxstudy.model.moe import mixtures_of
from mxstudy.reader import ConfigError, read, require
from mxstudy.small_files import read_json as read_small
from mxstudy.whole_files import replace_file


class Architecture(NamedTuple):
    """A model of Hugging Face's. `fields`: what our decoder must be. `head_dim`: its default; None: width / heads."""

    model_type: str
    fields: dict[str, bool]
    head_dim: int | None = None


LLAMA = "LlamaForCausalLM"
ARCHITECTURES = {
    LLAMA: Architecture("llama", {"qkv_bias": False, "qk_norm": False, "qk_norm_by_head": False}),
    "Qwen2ForCausalLM": Architecture("qwen2", {"qkv_bias": True, "qk_norm": False, "qk_norm_by_head": False}),
    "Qwen3ForCausalLM": Architecture("qwen3", {"qkv_bias": False, "qk_norm": True, "qk_norm_by_head": True}, 128),
}
KV_HEADS = "num_key_value_heads"
ONLY = {  # keys of a config with the only value that can be read, which is also their default
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
}
ROPE = {  # key of a scaled rotary embedding in Hugging Face's config -> key in ours
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_length",
}
CONFIG, TOKENIZER, ABOUT_TOKENIZER = "config.json", "tokenizer.json", "tokenizer_config.json"
MOST_IDS = 2**32
SAYS = (CONFIG, TOKENIZER, ABOUT_TOKENIZER)  # the files that describe a model, beside its weights
WHOLE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# In each layer: our tensor -> Hugging Face's tensors that are fused in it, in order.
FUSED = {
    "attention.wqkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.wqkv.norm.weight": ("input_layernorm.weight",),
    "attention.wo.weight": ("self_attn.o_proj.weight",),
    "feed_forward.w13.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "feed_forward.w13.norm.weight": ("post_attention_layernorm.weight",),
    "feed_forward.w2.weight": ("mlp.down_proj.weight",),
}
# The same for what only some decoders have, by the field of the config that says so.
FUSED_IF: dict[str, dict[str, tuple[str, ...]]] = {
    "qkv_bias": {"attention.qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")},
    "qk_norm": {
        "attention.q_norm.weight": ("self_attn.q_norm.weight",),
        "attention.k_norm.weight": ("self_attn.k_norm.weight",),
    },
}
OF_THE_MLP = ("feed_forward.w13.weight", "feed_forward.w2.weight")  # of a dense MLP; `tensors_of` has a mixture's
SHAPES = {  # key in Hugging Face's config -> key in ours
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    KV_HEADS: "num_kv_heads",
    "vocab_size": "vocab_size",
}


def export(
    model: Decoder, norm: config.Norm, tokenizer: Tokenizer, sequence_length: int, folder: Path, dtype: str = "float32"
) -> None:
    """Write model.safetensors, config.json, tokenizer.json and tokenizer_config.json to a new folder.

    `dtype`: dtype of the weights, float32 or bfloat16. Raises ConfigError if the decoder is none of ARCHITECTURES, or
    if the folder exists.
    """
    hf_config = config_of(model.config, norm, sequence_length) | {
        "torch_dtype": dtype,
        "eos_token_id": tokenizer.eos_id,
    }
    require(not folder.exists(), f"{folder}: exists already; give a new folder")
    folder.mkdir(parents=True)
    stored = getattr(torch, dtype)
    state = {
        name: tensor.to(torch.float32 if name.endswith(KEEPS_FP32) else stored).contiguous()
        for name, tensor in to_hugging_face(model).items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    replace_file(folder / CONFIG, json.dumps(hf_config, indent=2))
    tokenizer.save(folder / TOKENIZER)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token}
    replace_file(folder / ABOUT_TOKENIZER, json.dumps(about, indent=2))


def config_of(model: config.Decoder, norm: config.Norm, sequence_length: int) -> dict[str, Any]:
    """Return the content of config.json. Raises ConfigError for a model that none of ARCHITECTURES is.

    A mixture of experts is a Llama but for its MLP (`mxstudy.evaluation.hugging_face_moe`).
    """
    is_mixture = model.mlp == "moe"
    require(is_mixture or model.mlp == "swiglu", f"model.mlp: Llama and Qwen have swiglu, not {model.mlp}")
    require(not isinstance(norm, config.LayerNorm), "norm: Llama has no LayerNorm; RMSNorm and MXNorm can be exported")
    own = {name: getattr(model, name) for name in ARCHITECTURES["LlamaForCausalLM"].fields}
    name = next((name for name, known in ARCHITECTURES.items() if known.fields == own), None)
    said = ", ".join(key for key, is_set in own.items() if is_set)
    require(name is not None, f"model: none of {', '.join(ARCHITECTURES)} has just {said}; it cannot be exported")
    require(not (is_mixture and said), f"model: a mixture of experts cannot be exported with {said}; a Llama has none")
    return {
        "architectures": [name],
        "model_type": ARCHITECTURES[str(name)].model_type,
        "rms_norm_eps": norm.eps,
        "max_position_embeddings": sequence_length,
        "tie_word_embeddings": False,
        "head_dim": model.head_size,
        **ONLY,
        **rope_of(model),
        **{theirs: getattr(model, ours) for theirs, ours in SHAPES.items()},
        **(settings_of(model) if is_mixture else {}),
    }


def rope_of(model: config.Decoder) -> dict[str, Any]:
    """Return the rotary embedding in config.json's keys, those of today and those before transformers 5."""
    theta, scaling = model.rope_theta, model.rope_scaling
    if scaling is None:
        return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    scaled = {"rope_type": "llama3"} | {theirs: getattr(scaling, ours) for theirs, ours in ROPE.items()}
    return {"rope_theta": theta, "rope_scaling": scaled, "rope_parameters": scaled | {"rope_theta": theta}}


def to_hugging_face(model: Decoder) -> dict[str, Tensor]:
    """Return Hugging Face's state dict: views of the model's tensors."""
    own, state = model.state_dict(), {}
    for name, theirs in WHOLE.items():
        state[theirs] = own[name]
    for layer in range(model.config.num_layers):
        for name, parts in fused_in(model.config).items():
            whole = own[f"layers.{layer}.{name}"]
            tensors = whole.split(sizes(name, model.config)) if len(parts) > 1 else [whole]
            state |= {f"model.layers.{layer}.{part}": tensor for part, tensor in zip(parts, tensors, strict=True)}
    for layer, mixture in enumerate(mixtures_of(model).values()):
        state |= {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors_of(mixture, model.config)}
    return state


def from_hugging_face(state: Mapping[str, Tensor], model: config.Decoder) -> dict[str, Tensor]:
    """Return the state dict that `Decoder.load_state_dict` takes.

    Raises ConfigError if a tensor is missing or left over, or if shapes cannot be fused.
    """
    left, own = dict(state), {}

    def take(name: str) -> Tensor:
        require(name in left, f"checkpoint: {name} is missing; is this what its config says?")
        return left.pop(name)

    for layer in range(model.num_layers):
        for name, parts in fused_in(model).items():
            tensors = [take(f"model.layers.{layer}.{part}") for part in parts]
            rows = {tuple(tensor.shape[1:]) for tensor in tensors}
            require(len(rows) == 1, f"checkpoint: {' and '.join(parts)} of layer {layer} have rows of different sizes")
            own[f"layers.{layer}.{name}"] = torch.cat(tensors)
    own |= {name: take(theirs) for name, theirs in WHOLE.items()}
    rest = [name for name in left if not name.endswith("rotary_emb.inv_freq")]
    require(not rest, f"checkpoint: has unknown tensors {', '.join(rest[:3])}")
    return own


def fused_in(model: config.Decoder) -> dict[str, tuple[str, ...]]:
    """Return FUSED with the rows of FUSED_IF that this decoder has, and without an MLP's if it has experts instead."""
    found = FUSED | {k: v for field, rows in FUSED_IF.items() if getattr(model, field) for k, v in rows.items()}
    return {k: v for k, v in found.items() if model.mlp != "moe" or k not in OF_THE_MLP}


def sizes(name: str, model: config.Decoder) -> list[int]:
    """Return the numbers of rows of the tensors that are fused in one of ours."""
    if name == "feed_forward.w13.weight":
        return [model.ffn_size] * 2
    return [model.head_size * count for count in (model.num_heads, model.num_kv_heads, model.num_kv_heads)]


def read_config(folder: Path) -> tuple[config.Decoder, config.RMSNorm, int]:
    """Return decoder config, norm config and longest sequence in tokens of a Hugging Face model.

    Raises ConfigError for another architecture, for a feature that our decoder does not have, and for a broken file.
    """
    path = folder / CONFIG
    require(path.is_file(), f"checkpoint: {folder} has no {CONFIG}")
    values = read_json(path)
    named = values.get("architectures") or "none"
    name = ", ".join(map(str, named)) if isinstance(named, list) else named
    require(name in ARCHITECTURES, f"checkpoint: {folder} is {name}; only {', '.join(ARCHITECTURES)} can be read")
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}  # all of one, as transformers takes them
    require(isinstance(rope, dict), f"checkpoint: {path}: rope_parameters or rope_scaling is {rope!r}, not a mapping")
    for key, wanted in ONLY.items():
        found = rope.get(key, values.get(key, wanted))
        require(found == wanted, f"checkpoint: {key} {found!r}; only {wanted!r} can be read")
    layers = values.get("layer_types") or []
    require(isinstance(layers, list), f"checkpoint: {path}: layer_types is {layers!r}, not a list")
    others = sorted({*map(str, layers)} - {"full_attention"})
    require(not others, f"checkpoint: layer_types {', '.join(others)}; only full_attention can be read")
    if values.get(KV_HEADS) is None and (KV_HEADS in values or name == LLAMA):  # transformers takes 32 for others
        values[KV_HEADS] = values.get("num_attention_heads")
    missing = [key for key in (*SHAPES, "rms_norm_eps", "max_position_embeddings") if key not in values]
    require(not missing, f"checkpoint: {path} has no {', '.join(missing)}")
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    try:
        model = read(
            config.Decoder,
            {
                "rope_theta": theta,
                "rope_scaling": scaling_of(rope),
                "head_dim": head_dim_of(values, ARCHITECTURES[name]),
                **ARCHITECTURES[name].fields,
                **{ours: values[key] for key, ours in SHAPES.items()},
            },
        )
        norm = read(config.RMSNorm, {"eps": values["rms_norm_eps"]})
        length = read(int, values["max_position_embeddings"], "max_position_embeddings")
    except ConfigError as error:
        raise ConfigError(f"checkpoint: {path}: {error}") from None
    return model, norm, length


def scaling_of(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the scaling of a rotary embedding in our keys, None for the default. Raises ConfigError for another."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(kind in ("default", "llama3"), f"rotary embedding {kind!r}; only default and llama3 can be read")
    if kind == "default":
        return None
    missing = [key for key in ROPE if key not in rope]
    require(not missing, f"its rotary embedding llama3 has no {', '.join(missing)}")
    return {ours: rope[key] for key, ours in ROPE.items()}


def head_dim_of(values: Mapping[str, Any], architecture: Architecture) -> int | None:
    """Return the features of a head, or None if they are width / heads."""
    found = values.get("head_dim") or architecture.head_dim
    sizes = found, values["num_attention_heads"], values["hidden_size"]
    if any(type(size) is not int for size in sizes):
        return found  # None, or an error where the config is read
    return None if found * sizes[1] == sizes[2] else found


def read_eos(folder: Path) -> str | None:
    """Return the token that ends a document: named in the tokenizer's config, else the first id in the model's config.

    Returns None if neither has one.
    """
    about = folder / ABOUT_TOKENIZER
    named = read_json(about).get("eos_token") if about.is_file() else None
    named = named.get("content") if isinstance(named, dict) else named
    if named is not None:
        return str(named)
    ids = read_json(folder / CONFIG).get("eos_token_id")
    first = next(iter(ids), None) if isinstance(ids, list) else ids
    if first is None or not (folder / TOKENIZER).is_file():
        return None
    tokens = find_pretrained(str(folder / TOKENIZER))
    is_there = type(first) is int and 0 <= first < MOST_IDS
    token = tokens.id_to_token(first) if is_there else None
    if token is None:
        raise ConfigError(f"checkpoint: {folder / CONFIG}: eos_token_id {first!r} is no id of its {TOKENIZER}")
    return token


def read_json(path: Path) -> dict[str, Any]:
    try:
        return read_small(path, "download it again")
    except ConfigError as error:
        raise ConfigError(f"checkpoint: {error}") from None


def read_state(folder: Path, read_file: Callable[[Path], dict[str, Tensor]] = load_file) -> dict[str, Tensor]:
    """Return all tensors of a folder's safetensors files; of a tied model, the head is the embedding.

    Raises ConfigError if there are none or a file is broken.
    """
    files = sorted(folder.glob("*.safetensors"))
    require(bool(files), f"checkpoint: {folder} has no *.safetensors")
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state |= read_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"checkpoint: {file} is truncated or unreadable: {error}") from error
    embedding = state.get(WHOLE["tok_embeddings.weight"])
    if embedding is not None and read_json(folder / CONFIG).get("tie_word_embeddings"):
        state[WHOLE["output.weight"]] = embedding
    return state


def headers(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on the meta device: only names and shapes are read."""
    with safe_open(file, framework="pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118  it is no dict
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
