"""Time a layer's attention, forward and backward, by each backend of PyTorch that can compute it.

Causal, in bf16, with the model's heads and grouped queries. "as the model calls it" leaves the choice to PyTorch; the
others are asked for by name. flex: FlexAttention with a causal mask, compiled. tflop_per_s counts the half of the
scores that is needed, as MFU does, and nothing that the backward computes again. over_ours: the median time over that
of "as the model calls it".

python -m benchmarks.attention [--model llama_1b] [--tokens 32768] [--sequence 4096] [--seconds 2] [--json PATH]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.report import device_option, measured, options_of, positive, show
from benchmarks.timing import microseconds
from benchmarks.training import LLAMAS, model_of
from mxstudy import config
from mxstudy.train.runtime import resolve_device

OURS = "as the model calls it"
BACKENDS = {
    "cuda": {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION},
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH},
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def by_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return by_torch(q, k, v)


def by_flex(length: int, device: torch.device) -> Attention:
    """Return FlexAttention for causal sequences of this length, compiled."""
    causal = create_block_mask(lambda b, h, query, key: query >= key, None, None, length, length, device=str(device))
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=causal, enable_gqa=True)


def both_ways(attention: Attention, k: Tensor, v: Tensor, dout: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v [B, N, T, H]."""
    leaves = [y.detach().requires_grad_() for y in (q, k, v)]
    return torch.autograd.grad(attention(*leaves), leaves, dout)


def flops(model: config.Decoder, tokens: int, length: int) -> float:
    """Return the FLOPs of two products forward and four backward, over the causal half of the scores."""
    return 6 * 2 * tokens * length / 2 * model.num_heads * model.head_size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("attention", __doc__)
    parser.add_argument("--model", choices=LLAMAS, default="llama_1b", metavar="MODEL", help="a file of conf/model")
    parser.add_argument("--tokens", type=positive, default=32768, help="default: %(default)s")
    parser.add_argument("--sequence", type=positive, default=4096, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for all rounds; default: %(default)s")
    device_option(parser)
    chosen = parser.parse_args(arguments)
    if chosen.tokens % chosen.sequence:
        parser.error(f"--tokens: must be a multiple of --sequence, {chosen.sequence}; not {chosen.tokens}")
    model, device = model_of(chosen.model), resolve_device(chosen.device)
    length = chosen.sequence
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
    drawn = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device, dtype=torch.bfloat16)
    q, k, v, dout = (drawn(chosen.tokens // length, length, n, model.head_size).transpose(1, 2) for n in heads)
    ways: dict[str, Attention] = {OURS: by_torch}
    ways |= {name: partial(by_backend, backend) for name, backend in BACKENDS[device.type].items()}
    if device.type == "cuda":
        ways["flex"] = by_flex(length, device)
    calls = {name: partial(both_ways, attention, k, v, dout) for name, attention in ways.items()}
    found = microseconds(calls, q, q.numel() * q.itemsize, chosen.seconds)
    of = flops(model, chosen.tokens, length)
    rows = [
        {
            "by": name,
            "us": us.median,
            "us_spread": (us.q3 - us.q1) / 2,
            "tflop_per_s": of / us.median / 1e6,
            "over_ours": us.median / found[OURS].median,
            "ms_of_step": us.median * model.num_layers / 1e3,
        }
        for name, us in found.items()
    ]
    show(rows)
    settings = {"model": chosen.model, "tokens": chosen.tokens, "sequence": length, "device": device.type}
    measured(rows, chosen.json, **settings)


if __name__ == "__main__":
    main()
