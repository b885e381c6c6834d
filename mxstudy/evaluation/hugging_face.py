"""Convert a native Llama to Hugging Face's format and back: same tensors, other names, fused linears split.

An RMSNorm model stays the same function. Hugging Face's Llama divides by the exact RMS and casts nothing, so an MXNorm
or quantised model becomes a different function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from mxstudy.whole_files import replace_file

ARCHITECTURE = "LlamaForCausalLM"
CONFIG, TOKENIZER, ABOUT_TOKENIZER = "config.json", "tokenizer.json", "tokenizer_config.json"
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
OF_THE_MLP = ("feed_forward.w13.weight", "feed_forward.w2.weight")
SHAPES = {  # key in Hugging Face's config -> key in ours
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "vocab_size": "vocab_size",
}


def export(
    model: Decoder, norm: config.Norm, tokenizer: Tokenizer, sequence_length: int, folder: Path, dtype: str = "float32"
) -> None:
    """Write model.safetensors, config.json, tokenizer.json and tokenizer_config.json to a new folder.

    `dtype`: dtype of the weights, float32 or bfloat16. Raises ConfigError if the decoder is not a Llama, or if the
    folder exists.
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
    """Return the content of config.json. Raises ConfigError for a model that Llama's config cannot describe.

    A mixture of experts is a Llama but for its MLP (`mxstudy.evaluation.hugging_face_moe`).
    """
    is_mixture = model.mlp == "moe"
    for name, wanted in {"mlp": "moe" if is_mixture else "swiglu", "qk_norm": False}.items():
        require(getattr(model, name) == wanted, f"model.{name}: a Llama has {wanted}, not {getattr(model, name)}")
    require(not isinstance(norm, config.LayerNorm), "norm: Llama has no LayerNorm; RMSNorm and MXNorm can be exported")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": norm.eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "max_position_embeddings": sequence_length,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **{theirs: getattr(model, ours) for theirs, ours in SHAPES.items()},
        **(settings_of(model) if is_mixture else {}),
    }


def to_hugging_face(model: Decoder) -> dict[str, Tensor]:
    """Return Hugging Face's state dict: views of the model's tensors."""
    own, state = model.state_dict(), {}
    for name, theirs in WHOLE.items():
        state[theirs] = own[name]
    for layer in range(model.config.num_layers):
        for name, parts in FUSED.items():
            if model.config.mlp == "moe" and name in OF_THE_MLP:
                continue
            tensors = own[f"layers.{layer}.{name}"].split(sizes(name, model.config))
            state |= {f"model.layers.{layer}.{part}": tensor for part, tensor in zip(parts, tensors, strict=True)}
    for layer, mixture in enumerate(mixtures_of(model).values()):
        state |= {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors_of(mixture, model.config)}
    return state


def from_hugging_face(state: Mapping[str, Tensor], model: config.Decoder) -> dict[str, Tensor]:
    """Return the state dict that `Decoder.load_state_dict` takes.

    Raises ConfigError if a tensor is missing or left over, or if shapes cannot be fused.
    """
    left, own = dict(state), {}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}

    def take(name: str) -> Tensor:
        if name not in left and name in tied:
            return state[tied[name]]
        require(name in left, f"checkpoint: {name} is missing; is this a Llama?")
        return left.pop(name)

    for layer in range(model.num_layers):
        for name, parts in FUSED.items():
            tensors = [take(f"model.layers.{layer}.{part}") for part in parts]
            rows = {tuple(tensor.shape[1:]) for tensor in tensors}
            require(len(rows) == 1, f"checkpoint: {' and '.join(parts)} of layer {layer} have rows of different sizes")
            own[f"layers.{layer}.{name}"] = torch.cat(tensors)
    own |= {name: take(theirs) for name, theirs in reversed(WHOLE.items())}
    rest = [name for name in left if not name.endswith("rotary_emb.inv_freq")]
    require(not rest, f"checkpoint: has unknown tensors {', '.join(rest[:3])}")
    return own


def sizes(name: str, model: config.Decoder) -> list[int]:
    """Return the numbers of rows of the linears that are fused in one of our tensors."""
    kv_size = model.hidden_size // model.num_heads * model.num_kv_heads
    return {
        "attention.wqkv.weight": [model.hidden_size, kv_size, kv_size],
        "feed_forward.w13.weight": [model.ffn_size] * 2,
    }.get(name, [model.hidden_size])


def read_config(folder: Path) -> tuple[config.Decoder, config.RMSNorm, int]:
    """Return decoder config, norm config and longest sequence in tokens of a Hugging Face Llama.

    Raises ConfigError for another architecture, for a feature that our decoder does not have, and for a broken file.
    """
    path = folder / CONFIG
    require(path.is_file(), f"checkpoint: {folder} has no {CONFIG}")
    values = read_json(path)
    name = (values.get("architectures") or ["none"])[0]
    require(name == ARCHITECTURE, f"checkpoint: {folder} is {name}; only {ARCHITECTURE} can be read")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    require(kind == "default", f"checkpoint: rotary embedding {kind!r}; only the default one can be read")
    activation = values.get("hidden_act", "silu")
    require(activation == "silu", f"checkpoint: hidden_act {activation!r}; only silu can be read")
    for key in ("attention_bias", "mlp_bias"):
        require(not values.get(key), f"checkpoint: {key}; only linears without bias can be read")
    values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
    missing = [key for key in (*SHAPES, "rms_norm_eps", "max_position_embeddings") if key not in values]
    require(not missing, f"checkpoint: {path} has no {', '.join(missing)}")
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    try:
        model = read(config.Decoder, {"rope_theta": theta} | {ours: values[key] for key, ours in SHAPES.items()})
        norm = read(config.RMSNorm, {"eps": values["rms_norm_eps"]})
        length = read(int, values["max_position_embeddings"], "max_position_embeddings")
    except ConfigError as error:
        raise ConfigError(f"checkpoint: {path}: {error}") from None
    expected = model.hidden_size // model.num_heads
    head_size = values.get("head_dim") or expected
    require(
        head_size == expected, f"checkpoint: head_dim {head_size}; only hidden_size / heads, {expected}, can be read"
    )
    return model, norm, length


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
    if not isinstance(first, int) or not (folder / TOKENIZER).is_file():
        return None
    return find_pretrained(str(folder / TOKENIZER)).id_to_token(first)


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint: {path} cannot be read as JSON: {error}") from error
    require(isinstance(values, dict), f"checkpoint: {path} must be a JSON object, not {type(values).__name__}")
    return values


def read_state(folder: Path, read_file: Callable[[Path], dict[str, Tensor]] = load_file) -> dict[str, Tensor]:
    """Return all tensors of a folder's safetensors files. Raises ConfigError if there are none or a file is broken."""
    files = sorted(folder.glob("*.safetensors"))
    require(bool(files), f"checkpoint: {folder} has no *.safetensors")
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state |= read_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"checkpoint: {file} is truncated or unreadable: {error}") from error
    return state


def headers(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file on the meta device: only names and shapes are read."""
    with safe_open(file, framework="pt") as opened:
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118  it is no dict
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
