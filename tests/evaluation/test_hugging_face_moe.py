"""A mixture of experts has the logits of transformers' own models, or is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mxstudy import config
from mxstudy.data.tokenizer import ByteTokenizer
from mxstudy.evaluation.checkpoints import describe
from mxstudy.evaluation.export import log_probs, theirs
from mxstudy.evaluation.hugging_face import export
from mxstudy.evaluation.hugging_face_moe import LAYOUTS, layout_of
from mxstudy.model.decoder import Decoder
from mxstudy.model.moe import mixtures_of
from mxstudy.numerics.cast import BlockCast
from mxstudy.reader import ConfigError

pytestmark = pytest.mark.integration
DENSE = config.Decoder(hidden_size=64, ffn_size=32, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=257)
SCALED = config.Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=16)
MIXTURES = {
    "mixtral": config.MoE(num_experts=6, gate="softmax", balance="loss"),
    "qwen2_moe": config.MoE(num_experts=6, num_shared=2, gate="softmax", balance="none"),
    "glm4_moe": config.MoE(num_experts=6, top_k=3, num_shared=1),
}


def mixture(moe: config.MoE, **changes: Any) -> Decoder:
    """Return a mixture whose experts and routers have weights large enough to matter."""
    model = Decoder(replace(DENSE, mlp="moe", moe=moe, **changes), config.RMSNorm(), BlockCast(), torch.float32)
    model.init_weights(0)
    with torch.no_grad():
        for e, own in enumerate(mixtures_of(model).values()):
            for weight in own.parameters():
                weight *= 4 if weight.ndim > 1 else 1
            if own.router.bias is not None:
                own.router.bias += 0.2 * torch.randn(6, generator=torch.Generator().manual_seed(e))
    return model


@pytest.mark.parametrize("changes", [{}, {"head_dim": 24, "rope_scaling": SCALED}], ids=["plain", "llama 3.1"])
@pytest.mark.parametrize("name", MIXTURES)
def test_transformers_computes_the_same_logits(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = mixture(MIXTURES[name], **changes)
    assert layout_of(model.config) is LAYOUTS[name]
    export(model, config.RMSNorm(), ByteTokenizer(), 64, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert type(theirs).__name__ == LAYOUTS[name].architecture
    tokens_BT = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens_BT).logits, model(tokens_BT), rtol=1e-4, atol=1e-5)


def test_biases_keep_their_bits_in_bf16(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = mixture(MIXTURES["glm4_moe"])
    export(model, config.RMSNorm(), ByteTokenizer(), 64, tmp_path / "hf", "bfloat16")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    biases = [own.router.bias for own in mixtures_of(model).values()]
    stored = [state[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] for layer in (0, 1)]
    assert all(bias is not None and torch.equal(own, bias) for own, bias in zip(stored, biases, strict=True))
    assert state["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16


def test_the_export_is_compared_with_transformers(tmp_path: Path) -> None:
    model = mixture(MIXTURES["qwen2_moe"])
    export(model, config.RMSNorm(), ByteTokenizer(), 64, tmp_path / "hf")
    tokens_BT = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(0))
    found = log_probs(theirs(tmp_path / "hf", "float32", torch.device("cpu")), tokens_BT)
    with torch.no_grad():
        expected = model(tokens_BT[:, :-1]).log_softmax(-1).gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_mixture_of_others_cannot_be_read(tmp_path: Path) -> None:
    export(mixture(MIXTURES["mixtral"]), config.RMSNorm(), ByteTokenizer(), 64, tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"is MixtralForCausalLM; only LlamaForCausalLM, .* can be read"):
        describe(tmp_path / "hf")


@pytest.mark.parametrize(
    ("moe", "says"),
    [
        ({"activation": "relu2"}, r"model\.moe\.activation: relu2; experts in Hugging Face's formats have swiglu"),
        ({"num_shared": 0}, r"model\.moe\.num_shared: 0; a sigmoid gate can be exported as a GLM-4-MoE"),
        ({"gate": "softmax"}, r"model\.moe\.balance: bias; a softmax gate can be exported as a Mixtral or Qwen2-MoE"),
        (
            {"gate": "softmax", "balance": "none", "top_k": 1, "num_shared": 0},
            r"model\.moe\.top_k: 1; .* a Mixtral, which gives one expert weight 1",
        ),
    ],
)
def test_what_no_format_has_is_refused(moe: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        layout_of(replace(DENSE, mlp="moe", moe=config.MoE(**{"num_shared": 1, **moe})))  # type: ignore[arg-type]


def test_an_attention_that_is_no_llamas_is_refused(tmp_path: Path) -> None:
    for changes, said in (({"qkv_bias": True}, "qkv_bias"), ({"qk_norm": True, "qk_norm_by_head": True}, "qk_norm, ")):
        model = mixture(MIXTURES["qwen2_moe"], **changes)
        with pytest.raises(ConfigError, match=f"a mixture of experts cannot be exported with {said}"):
            export(model, config.RMSNorm(), ByteTokenizer(), 64, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
