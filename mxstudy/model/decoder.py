"""The decoder: pre-norm blocks of grouped-query attention and an MLP. Llama 3, OLMo and Nemotron-4 are configs of it.

Shapes: B sequences, T tokens, D hidden size, N heads, H head size, V vocabulary. Every norm that reads the residual
stream inside a block is fused with the linear that reads it. The final norm, the norms of queries and keys, the
embedding and the output head stay in high precision.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxstudy import config
from mxstudy.blocks.decoder_block import FusedBlock, after_attention, before_attention, split_heads
from mxstudy.config.casts import BlockCast
from mxstudy.distributed import draw_in_turns
from mxstudy.model.dropout import Dropout, attend_dropped, dropout_of, dropped
from mxstudy.model.feed_forward import INITS, FeedForward
from mxstudy.model.fusable import Fusable, Target, check_hooks, linears_in, why_not_known
from mxstudy.model.fused_block import fused_block, fused_linears, why_not_fused_block
from mxstudy.model.head import Head
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.moe import MixtureOfExperts, Routed, Router, mixtures_of
from mxstudy.model.norm import Norm, build_exact_norm, build_norm
from mxstudy.model.past import Past
from mxstudy.model.seeds import generator_for, normal_weight
from mxstudy.numerics.rotary import frequencies, rotate, slowed

# Called with a norm's module name, the linear that the norm is fused with (or the norm itself), and the norm's input.
Watcher = Callable[[str, nn.Module, Tensor], None]


class Tree(NamedTuple):
    """Attention pattern of a sequence that branches: one beginning with several continuations.

    `positions_BT`: int64 positions for the rotary embedding. `mask_BTT`: bool [B, T, T], true where the token of the
    first T attends to that of the second. Every token must attend to at least one, if only to itself: a softmax over
    nothing is NaN.
    """

    positions_BT: Tensor
    mask_BTT: Tensor


class Attention(nn.Module):
    def __init__(self, model: config.Decoder, norm: config.Norm, cast: BlockCast, output_std: float) -> None:
        super().__init__()
        self.head_size = model.head_size
        q_size, kv_size = model.num_heads * self.head_size, model.num_kv_heads * self.head_size
        self.sizes = (q_size, kv_size, kv_size)
        std = INITS[model.init].linear(model, model.hidden_size)
        self.wqkv = NormLinear(build_norm(norm, model.hidden_size, cast), sum(self.sizes), std)
        self.wo = MXLinear(q_size, model.hidden_size, output_std)
        self.qkv_bias = nn.Parameter(torch.zeros(sum(self.sizes))) if model.qkv_bias else None
        normed = (self.head_size, self.head_size) if model.qk_norm_by_head else (q_size, kv_size)
        self.q_norm, self.k_norm = (build_exact_norm(norm, size) if model.qk_norm else None for size in normed)
        self.dropout = dropout_of(model.dropout)

    def forward(
        self, x_BTD: Tensor, rope_TH: Tensor, mask_BTT: Tensor | None = None, past: Past | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output [B, T, D] and {name: input} of the norms of queries and keys; causal without a mask."""
        q, k, v = self.biased(*split_heads(self.wqkv(x_BTD), self.sizes, self.head_size))
        q, k, norm_inputs = self.normed(q, k)
        heads_BTD = attend(rotate(q, rope_TH), rotate(k, rope_TH), v, mask_BTT, self.dropout, past)
        return self.wo(heads_BTD), norm_inputs

    @property
    def turns_late(self) -> bool:
        """Return whether a bias or a norm comes between the linear and the rotary embedding."""
        return self.q_norm is not None or self.qkv_bias is not None

    def biased(self, *heads: Tensor) -> list[Tensor]:
        """Return queries, keys and values [B, T, N, H], with their bias if they have one."""
        if self.qkv_bias is None:
            return [*heads]
        biases = split_heads(self.qkv_bias.to(heads[0].dtype), self.sizes, self.head_size)
        return [y_BTNH + bias_NH for y_BTNH, bias_NH in zip(heads, biases, strict=True)]

    def normed(self, q_BTNH: Tensor, k_BTNH: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return queries and keys after their norms, and {name: input} of those norms ({} if there are none)."""
        if self.q_norm is None or self.k_norm is None:
            return q_BTNH, k_BTNH, {}
        q, k = (
            y_BTNH if norm.size == self.head_size else y_BTNH.flatten(2)
            for y_BTNH, norm in ((q_BTNH, self.q_norm), (k_BTNH, self.k_norm))
        )
        norm_inputs = {"attention.q_norm": q.detach(), "attention.k_norm": k.detach()}
        return self.q_norm(q).view_as(q_BTNH), self.k_norm(k).view_as(k_BTNH), norm_inputs


def attend(
    q_BTNH: Tensor,
    k_BTNH: Tensor,
    v_BTNH: Tensor,
    mask_BTT: Tensor | None,
    dropout: Dropout | None = None,
    past: Past | None = None,
) -> Tensor:
    """Return the heads' attention outputs, concatenated: [B, T, D]. Keys and values are added to the `past`, if any.

    `dropout`: of the attention's weights. The last reshape copies nothing, because torch gives the result the memory
    layout of the queries.
    """
    if past is not None:
        k_BTNH, v_BTNH = past.extended(k_BTNH, v_BTNH)
    q, k, v = (y.transpose(1, 2) for y in (q_BTNH, k_BTNH, v_BTNH))
    dropout = dropout if dropout is not None and dropout.training else None
    if mask_BTT is not None or dropout is not None:  # flash attention, which takes grouped queries, has neither
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
    if dropout is not None:
        out_BNTH = attend_dropped(q, k, v, mask_BTT, dropout)
    elif mask_BTT is None:
        is_causal = q.shape[2] == k.shape[2]  # else the only query is the last token's, which reads all others
        out_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
    else:
        out_BNTH = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BTT[:, None])
    return out_BNTH.transpose(1, 2).flatten(2)


class Block(Fusable):
    """One decoder block: attention and an MLP, each with its pre-norm and a residual connection.

    `fused`: the settings of the two fused functions that compute the block, or None to run it module by module;
    `mxstudy.model.backends` decides.
    """

    fused: FusedBlock | None = None

    def __init__(self, layer: int, model: config.Decoder, norm: config.Norm, cast: BlockCast) -> None:
        super().__init__()

        def output_std(fan_in: int) -> float:
            return INITS[model.init].linear(model, fan_in) / (2 * (layer + 1)) ** 0.5

        self.attention = Attention(model, norm, cast, output_std(model.num_heads * model.head_size))
        mlp = MixtureOfExperts if model.mlp == "moe" else FeedForward
        self.feed_forward = mlp(model, norm, cast, output_std(model.ffn_size))
        self.attention_dropout, self.ffn_dropout = dropout_of(model.dropout), dropout_of(model.dropout)

    def forward(
        self, x_BTD: Tensor, rope_TH: Tensor, mask_BTT: Tensor | None = None, past: Past | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Routed | None]:
        """Return the block's output, the inputs of its later norms by name, and its routing if it has a router."""
        if self.fused is not None:
            return self.forward_fused(x_BTD, rope_TH, mask_BTT, self.fused, past)
        attended_BTD, norm_inputs = self.attention(x_BTD, rope_TH, mask_BTT, past)
        h_BTD = x_BTD + dropped(attended_BTD, self.attention_dropout)
        ffn_BTD, routing = self.feed_forward(h_BTD)
        return h_BTD + dropped(ffn_BTD, self.ffn_dropout), norm_inputs | {"ffn_norm": h_BTD}, routing

    def forward_fused(
        self, x_BTD: Tensor, rope_TH: Tensor, mask_BTT: Tensor | None, settings: FusedBlock, past: Past | None = None
    ) -> tuple[Tensor, dict[str, Tensor], None]:
        """Return the same as `forward`, computed from the modules' weights by the two fused functions."""
        check_hooks((self.attention, self.feed_forward, *linears_in(self)))  # none of them is called
        attention, (wqkv, wo, up, w2) = self.attention, fused_linears(self)
        rope, affine = None if attention.turns_late else rope_TH, wqkv.gain_and_bias(x_BTD)
        q, k, v, x_BTD = before_attention(x_BTD, affine, wqkv.weight, rope, keys_of(wqkv), settings)
        q, k, v = attention.biased(q, k, v)
        q, k, norm_inputs = attention.normed(q, k)
        if attention.turns_late:
            q, k = rotate(q, rope_TH), rotate(k, rope_TH)
        heads_BTD, affine = attend(q, k, v, mask_BTT, past=past), up.gain_and_bias(x_BTD)
        keys, weights = keys_of(wo, up, w2), (up.weight, w2.weight)
        out_BTD, h_BTD = after_attention(x_BTD, heads_BTD, wo.weight, affine, *weights, keys, settings)
        return out_BTD, norm_inputs | {"ffn_norm": h_BTD}, None

    def why_not_fused(self, target: Target) -> str | None:
        return why_not_known("attention", self.attention, Attention) or why_not_fused_block(self, target)

    def set_fused(self, fused: bool) -> None:
        self.fused = fused_block(self) if fused else None

    def reader(self, norm: str) -> nn.Module:
        """Return the linear that a norm is fused with, or the norm if it stands on its own."""
        linears = {"attention_norm": self.attention.wqkv, "ffn_norm": self.feed_forward.up}
        return linears.get(norm) or self.get_submodule(norm)


def keys_of(*linears: MXLinear) -> tuple[Tensor | None, ...]:
    """Return these linears' random streams as a fused block takes them: each linear's keys, then the shared places."""
    randoms = [linear.random for linear in linears]
    places = next((random.places for random in randoms if random), None)
    return *(random.keys if random else None for random in randoms), places


class Decoder(nn.Module):
    """Map tokens [B, T] int64 to logits [B, T, V] in the compute dtype, or with targets to the loss, see `Head`.

    During the forward pass each of `watchers` is called with every norm's input, which it may read but not write.
    `routings`: the routing of each block in the last forward; empty in a dense model.
    A new decoder has weights drawn by torch's generator; `init_weights` draws those of a run.
    """

    def __init__(self, model: config.Decoder, norm: config.Norm, cast: BlockCast, compute: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute = model, compute
        drawn_VD = normal_weight((model.vocab_size, model.hidden_size), (INITS[model.init].embedding(model),))
        self.tok_embeddings = nn.Embedding.from_pretrained(drawn_VD, freeze=False)
        self.dropout = dropout_of(model.dropout)
        self.layers = nn.ModuleList(Block(i, model, norm, cast) for i in range(model.num_layers))
        self.norm = build_exact_norm(norm, model.hidden_size)
        self.output = Head(model.hidden_size, model.vocab_size, model.hidden_size**-0.5)
        self.watchers: tuple[Watcher, ...] = ()
        self.routings: list[Routed] = []

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, divisor: int = 1) -> Tensor:
        features_BTD = self.features(tokens_BT)
        return self.output(features_BTD) if targets_BT is None else self.output(features_BTD, targets_BT, divisor)

    def features(self, tokens_BT: Tensor, tree: Tree | None = None, pasts: Sequence[Past] | None = None) -> Tensor:
        """Return the head's input [B, T, D]. Without a tree, attention is causal.

        With `pasts`, one for each layer, the tokens continue the ones that the pasts hold.
        """
        x_BTD = F.embedding(tokens_BT, self.tok_embeddings.weight).to(self.compute)  # its gradient is summed in FP32
        x_BTD = dropped(x_BTD, self.dropout)
        if tree is None:
            begin = pasts[0].length if pasts else 0
            rope_TH, mask_BTT = self.rope(tokens_BT.shape[1], tokens_BT.device, begin), None
        else:
            rope_TH, mask_BTT = self.angles(tree.positions_BT.float()), tree.mask_BTT
        self.routings = []
        for i, module in enumerate(self.layers):
            layer, x_in_BTD = typing.cast(Block, module), x_BTD
            x_BTD, norm_inputs, routing = layer(x_BTD, rope_TH, mask_BTT, pasts[i] if pasts else None)
            self.routings += [] if routing is None else [routing]
            for norm, y in {"attention_norm": x_in_BTD, **norm_inputs}.items():
                self.watch(f"layers.{i}.{norm}", layer.reader(norm), y)
        self.watch("norm", self.norm, x_BTD)
        return self.norm(x_BTD)

    def watch(self, name: str, module: nn.Module, x_BTD: Tensor) -> None:
        for watcher in self.watchers:
            watcher(name, module, x_BTD.detach())

    def rope(self, length: int, device: torch.device, begin: int = 0) -> Tensor:
        """Return the angles of the rotary embedding at T positions from `begin` on: float32 [T, H / 2]."""
        return self.angles(torch.arange(begin, begin + length, device=device, dtype=torch.float32))

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angles of the rotary embedding, float32 [..., H / 2], at positions float32 [...]."""
        turning_H = frequencies(self.config.head_size, self.config.rope_theta, positions.device)
        if self.config.rope_scaling is not None:
            turning_H = slowed(turning_H, self.config.rope_scaling)
        return positions[..., None] * turning_H

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Reset norms, biases; draw embedding and linears from normals truncated at 3 sigma, with the stds of `INITS`.

        A parameter's values depend on the seed and its name alone, so they are equal for all norms, devices and world
        sizes.
        """
        embedding_std = INITS[self.config.init].embedding(self.config)
        weights: list[tuple[Tensor, Callable[[], Tensor]]] = []
        for name, module in self.named_modules():
            if isinstance(module, Norm):
                module.reset_parameters()
            elif isinstance(module, Attention) and module.qkv_bias is not None:
                nn.init.zeros_(module.qkv_bias)
            elif isinstance(module, nn.Embedding | MXLinear | Router):
                stds = (embedding_std,) if isinstance(module, nn.Embedding) else module.init_stds
                generator = generator_for(seed, f"{name}.weight")
                weights.append((module.weight, partial(normal_weight, module.weight.shape, stds, generator)))
            if isinstance(module, Router) and module.bias is not None:
                module.bias.zero_()
        draw_in_turns(weights)

    def num_params(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def idle_params(self) -> int:
        """Return the number of parameters that a token does not use, because it does not go to their experts."""
        return sum(mixture.idle_params for mixture in mixtures_of(self).values())

    def num_matmul_params(self) -> int:
        """Return the number of weights that each token is multiplied with, the head among them."""
        linears = (module for module in self.modules() if isinstance(module, MXLinear | Router))
        return sum(module.weight.numel() for module in linears) - self.idle_params

    def flops_per_token(self, sequence_length: int) -> int:
        """Return the FLOPs of forward and backward: 6 per matmul parameter, plus causal attention (half the square)."""
        attention = 6 * self.config.num_layers * self.config.num_heads * self.config.head_size * sequence_length
        return 6 * self.num_matmul_params() + attention
