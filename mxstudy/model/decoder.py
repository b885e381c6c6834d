"""One decoder: pre-norm blocks of grouped-query attention and SwiGLU; Llama 3 is one configuration of it.

Shapes: B sequences, T tokens, D hidden size, N heads, H head size, V vocabulary. Every norm inside a block is joined
to the fused linear that reads it; the final norm, the embedding and the output head stay in high precision.
"""

from __future__ import annotations

import hashlib
import typing
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxstudy import config
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.norm import Norm, RMSNorm, build_norm
from mxstudy.numerics.cast import BlockCast

# Called with a norm's module name, the norm with what reads it, and the norm's input.
Watcher = Callable[[str, nn.Module, Tensor], None]


class Attention(nn.Module):
    def __init__(self, model: config.Decoder, norm: Norm, output_std: float) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = model.num_heads, model.num_kv_heads
        self.head_size = model.hidden_size // model.num_heads
        heads = model.num_heads + 2 * model.num_kv_heads
        self.wqkv = NormLinear(norm, heads * self.head_size, model.init_std)
        self.wo = MXLinear(model.hidden_size, model.hidden_size, output_std)

    def forward(self, x_BTD: Tensor, rope_TH: Tensor) -> Tensor:
        qkv_BNTH = self.wqkv(x_BTD).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q, k, v = qkv_BNTH.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = rotate(q, rope_TH), rotate(k, rope_TH)
        out_BNTH = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads
        )
        return self.wo(out_BNTH.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x), w1 and w3 fused."""

    def __init__(self, model: config.Decoder, norm: Norm, output_std: float) -> None:
        super().__init__()
        self.w13 = NormLinear(norm, 2 * model.ffn_size, model.init_std)
        self.w2 = MXLinear(model.ffn_size, model.hidden_size, output_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.w13(x_BTD).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, layer: int, model: config.Decoder, norm: config.Norm, cast: BlockCast) -> None:
        super().__init__()
        output_std = model.init_std / (2 * (layer + 1)) ** 0.5
        self.attention = Attention(model, build_norm(norm, model.hidden_size, cast), output_std)
        self.feed_forward = FeedForward(model, build_norm(norm, model.hidden_size, cast), output_std)

    def forward(self, x_BTD: Tensor, rope_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output, and the input of its second norm: the backward keeps it anyway, and observers need it."""
        h_BTD = x_BTD + self.attention(x_BTD, rope_TH)
        return h_BTD + self.feed_forward(h_BTD), h_BTD


class Decoder(nn.Module):
    """tokens [B, T] int64 -> logits [B, T, V] in the compute dtype.

    `watchers` are shown every norm's input as the forward passes it; they may read it, not write.
    """

    def __init__(self, model: config.Decoder, norm: config.Norm, cast: BlockCast, compute: torch.dtype) -> None:
        super().__init__()
        self.config, self.compute = model, compute
        self.tok_embeddings = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Block(i, model, norm, cast) for i in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, norm.eps)
        self.output = MXLinear(model.hidden_size, model.vocab_size, model.hidden_size**-0.5)
        self.watchers: tuple[Watcher, ...] = ()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = F.embedding(tokens_BT, self.tok_embeddings.weight.to(self.compute))
        rope_TH = self.rope(tokens_BT.shape[1], tokens_BT.device)
        for i, module in enumerate(self.layers):
            layer, x_in_BTD = typing.cast(Block, module), x_BTD
            x_BTD, h_BTD = layer(x_BTD, rope_TH)
            self.watch(f"layers.{i}.attention_norm", layer.attention.wqkv, x_in_BTD)
            self.watch(f"layers.{i}.ffn_norm", layer.feed_forward.w13, h_BTD)
        self.watch("norm", self.norm, x_BTD)
        return self.output(self.norm(x_BTD))

    def watch(self, name: str, module: nn.Module, x_BTD: Tensor) -> None:
        for watcher in self.watchers:
            watcher(name, module, x_BTD.detach())

    def rope(self, length: int, device: torch.device) -> Tensor:
        """Angles of the rotary embedding: float32 [T, H / 2]."""
        half = self.config.hidden_size // self.config.num_heads // 2
        frequencies = self.config.rope_theta ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        return torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Gains 1, embedding N(0, 1), linears truncated normal at 3 sigma, residual outputs scaled by depth.

        Each parameter's numbers depend on the seed and its name alone: equal over norms, devices and world sizes.
        """
        for name, module in self.named_modules():
            if isinstance(module, Norm):
                module.weight.fill_(1.0)
            elif isinstance(module, nn.Embedding | MXLinear):
                digest = hashlib.sha256(f"{seed}:{name}.weight".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
                weight = torch.empty(module.weight.shape)
                std = module.init_std if isinstance(module, MXLinear) else 1.0
                module.weight.copy_(nn.init.trunc_normal_(weight, 0.0, std, -3 * std, 3 * std, generator=generator))

    def num_params(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def num_matmul_params(self) -> int:
        return sum(module.weight.numel() for module in self.modules() if isinstance(module, MXLinear))

    def flops_per_token(self, sequence_length: int) -> int:
        """Forward and backward: 6 a matmul parameter, and causal attention (half of the square)."""
        attention = 6 * self.config.num_layers * self.config.hidden_size * sequence_length
        return 6 * self.num_matmul_params() + attention


def rotate(x_BNTH: Tensor, rope_TH: Tensor) -> Tensor:
    """Rotary position embedding in FP32; feature i turns with feature i + H/2, as in Hugging Face's Llama."""
    x1, x2 = x_BNTH.float().chunk(2, dim=-1)
    cos, sin = rope_TH.cos(), rope_TH.sin()
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x_BNTH.dtype)
