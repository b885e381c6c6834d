"""A mixture of experts in Hugging Face's formats: Mixtral's, Qwen2-MoE's or GLM-4-MoE's, by gate and shared experts.

    layout      gate       shared experts                    biases of the choice
    Mixtral     softmax    none                              none
    Qwen2-MoE   softmax    one, times a sigmoid of its own   none
    GLM-4-MoE   sigmoid    one or more                       yes

Qwen2-MoE multiplies its shared experts by a sigmoid. With weights of 0 it is 1/2, so their last linear is exported
twice as large: exact in any floating point. All three have SwiGLU experts and a Llama's attention. What none of them
has is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy import config
from mxstudy.model.moe import MixtureOfExperts
from mxstudy.reader import require

KEEPS_FP32 = "e_score_correction_bias"  # it decides the choice, whatever the dtype of the weights


class Layout(NamedTuple):
    """How Hugging Face names a mixture. `settings`: the keys of config.json that only this layout has.

    `place`: the mixture's name in a layer. `parts`: an expert's gate, the linear that it multiplies, and the last one.
    `shared`: the name of the shared experts, or None if there are none.
    """

    architecture: str
    model_type: str
    settings: Callable[[config.Decoder], dict[str, Any]]
    place: str
    parts: tuple[str, str, str]
    shared: str | None = None


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LAYOUTS = {
    "mixtral": Layout(
        "MixtralForCausalLM",
        "mixtral",
        lambda model: {"num_local_experts": model.moe.num_experts, "sliding_window": None},
        "block_sparse_moe",
        ("w1", "w3", "w2"),
    ),
    "qwen2_moe": Layout(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        lambda model: {
            "num_experts": model.moe.num_experts,
            "moe_intermediate_size": model.ffn_size,
            "shared_expert_intermediate_size": model.moe.num_shared * model.ffn_size,
            "norm_topk_prob": model.moe.top_k > 1,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "qkv_bias": False,
        },
        "mlp",
        PROJECTIONS,
        "shared_expert",
    ),
    "glm4_moe": Layout(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        lambda model: {
            "n_routed_experts": model.moe.num_experts,
            "n_shared_experts": model.moe.num_shared,
            "moe_intermediate_size": model.ffn_size,
            "norm_topk_prob": model.moe.top_k > 1,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "use_qk_norm": False,
        },
        "mlp",
        PROJECTIONS,
        "shared_experts",
    ),
}


def layout_of(model: config.Decoder) -> Layout:
    """Return the layout that can hold a mixture of experts. Raises ConfigError for one that none can."""
    moe = model.moe
    require(
        moe.activation == "swiglu",
        f"model.moe.activation: {moe.activation}; experts in Hugging Face's formats have swiglu",
    )
    if moe.gate == "sigmoid":
        require(
            moe.num_shared > 0,
            "model.moe.num_shared: 0; a sigmoid gate can be exported as a GLM-4-MoE, which has shared experts",
        )
        return LAYOUTS["glm4_moe"]
    require(
        moe.balance != "bias",
        "model.moe.balance: bias; a softmax gate can be exported as a Mixtral or Qwen2-MoE, which have no biases",
    )
    if moe.num_shared:
        return LAYOUTS["qwen2_moe"]
    require(
        moe.top_k > 1,
        "model.moe.top_k: 1; without shared experts it can be exported as a Mixtral, which gives one expert weight 1",
    )
    return LAYOUTS["mixtral"]


def settings_of(model: config.Decoder) -> dict[str, Any]:
    """Return the keys of config.json that a mixture has beside those of a Llama, or instead of them."""
    layout = layout_of(model)
    own = {"architectures": [layout.architecture], "model_type": layout.model_type}
    return own | {"num_experts_per_tok": model.moe.top_k} | layout.settings(model)


def tensors_of(mixture: MixtureOfExperts, model: config.Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face's name in a layer, and the tensor, of all that a mixture has but its norm."""
    layout = layout_of(model)
    router = mixture.router
    yield f"{layout.place}.gate.weight", router.weight.detach()
    if layout.architecture == "Glm4MoeForCausalLM":
        bias = torch.zeros(model.moe.num_experts) if router.bias is None else router.bias
        yield f"{layout.place}.gate.{KEEPS_FP32}", bias
    for e in range(model.moe.num_experts):
        gate_up, down = mixture.up.weight[e].detach(), mixture.w2.weight[e].detach()
        for part, tensor in zip(layout.parts, (*gate_up.chunk(2), down), strict=True):
            yield f"{layout.place}.experts.{e}.{part}.weight", tensor
    if mixture.shared is not None:
        gate_up, down = mixture.shared.w13.weight.detach(), mixture.shared.w2.weight.detach()  # type: ignore[union-attr, operator]
        if layout.model_type == "qwen2_moe":
            yield f"{layout.place}.shared_expert_gate.weight", gate_up.new_zeros(1, model.hidden_size)
            down = 2 * down
        for part, tensor in zip(layout.parts, (*gate_up.chunk(2), down), strict=True):
            yield f"{layout.place}.{layout.shared}.{part}.weight", tensor
