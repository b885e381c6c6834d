"""Time the parts of a training step other than GEMMs, with their share of a copy's bandwidth in the same run.

swiglu backward, rotary forward and backward: a layer's, in bf16 and with both casts to E4M3, by our kernels and by
Inductor with its own settings for the same operations. norm forward and backward, in bf16, likewise: RMSNorm of the sum
of two tensors, and its gradient added to that of the sum. cross-entropy: that of a chunk of logits with their gradient,
likewise. --tiles adds our kernels' other tiles. clip, adamw, embedding gradient: the whole model's, as the step
computes them, beside the alternatives that torch has. bytes: the least that a part must read and write. of_copy: their
rate divided by that of a copy. ms_of_step: the time in all layers, or all chunks, together.

python -m benchmarks.parts [--model llama_1b] [--parts swiglu rotary] [--tiles] [--json PATH]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.report import device_option, measured, options_of, show
from benchmarks.timing import Calls, microseconds, once_us
from benchmarks.train_step import BATCH_SIZES
from benchmarks.training import LLAMAS, model_of
from mxstudy import config
from mxstudy.blocks.linear_cross_entropy import tokens_at_once
from mxstudy.config.casts import Gemms
from mxstudy.kernels import activation, heads, norm_backward, norm_cast
from mxstudy.kernels.cross_entropy import cross_entropy_, launch_cuda
from mxstudy.kernels.norm_cast import Normed, RowNorm
from mxstudy.kernels.operators import BF16, UNREAD, Tile, checked_casts, operand
from mxstudy.kernels.packing import pack, pack_fields
from mxstudy.model.decoder import Decoder
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.gemms import Linear
from mxstudy.numerics.rotary import rotate, rotate_back
from mxstudy.train.optimizer import build_optimizer
from mxstudy.train.runtime import resolve_device

aten = torch.ops.aten
Formats = tuple[str | None, str | None]
CASTS: dict[str, Formats] = {"bf16": (None, UNREAD), "both casts": ("E4M3", "E4M3")}
TILES = {
    "swiglu bf16": [Tile(4, 256, 4), Tile(2, 512, 4), Tile(4, 512, 4), Tile(32, 64, 4)],
    "swiglu both casts": [Tile(32, 32, 1), Tile(32, 32, 2), Tile(32, 64, 2), Tile(32, 64, 4)],
    "rotary bf16": [Tile(32, 32, 4), Tile(64, 32, 4), Tile(16, 32, 2)],
    "rotary both casts": [Tile(32, 32, 1), Tile(32, 32, 2), Tile(32, 32, 4)],
    "norm forward": [Tile(1, 2048, 4), Tile(2, 2048, 4), Tile(2, 2048, 8), Tile(4, 2048, 16)],
    "norm backward": [Tile(1, 2048, 8), Tile(2, 2048, 4), Tile(2, 2048, 8), Tile(4, 2048, 4), Tile(8, 2048, 8)],
    "cross-entropy": [Tile(1, 8192, 8), Tile(1, 8192, 16), Tile(1, 16384, 16), Tile(1, 32768, 32)],
}
PARTS = ("swiglu", "norm", "rotary", "cross-entropy", "weights")
REPEATS = 4  # calls between two events, so that the host is ahead of the GPU
ROUNDS = 9
SWIGLU = activation.Rounded("silu", True, True, True)


class Part(NamedTuple):
    """A part: its input x, the bytes that it must move, the calls that compute it, and how often a step needs it."""

    name: str
    x: Tensor
    moved: int
    calls: Calls
    times: int


def swiglu(model: config.Decoder, tokens: int, device: torch.device, tiles: bool) -> Iterator[Part]:
    """Yield the backward of SwiGLU. Its x is dz [tokens, ffn], then h [tokens, 2 ffn]."""
    size = model.ffn_size
    x = torch.randn(3 * tokens * size, device=device).to(BF16)
    for name, formats in CASTS.items():
        row, column = formats
        casts = checked_casts((tokens, 2 * size), row, column, BlockCast())
        of_z = checked_casts((tokens, size), UNREAD, row, BlockCast())

        def apart(x: Tensor) -> tuple[Tensor, Tensor]:
            return x[: tokens * size].view(tokens, size), x[tokens * size :].view(tokens, 2 * size)

        def composed(x: Tensor, formats: Formats = formats) -> tuple[Tensor, ...]:
            dz, h = apart(x)
            gate, up = h.chunk(2, dim=-1)
            dh = torch.cat((aten.silu_backward(dz * up, gate), dz * F.silu(gate)), dim=-1)
            return *plainly_cast(dh, formats), plainly_cast(F.silu(gate) * up, formats)[1]

        def ours(x: Tensor, casts: str = casts, of_z: str = of_z, **tile: Tile) -> tuple[Tensor, ...]:
            call = activation.launch_cuda_backward if tile else torch.ops.mxstudy.activation_backward_cast_both
            return call(*apart(x), pack(SWIGLU), casts, of_z, **tile)

        moved = tokens * size * 2 * (3 + 2 + 1 + (2 if row else 0))
        yield Part(
            f"swiglu backward, {name}", x, moved, beside(composed, ours, tiles, f"swiglu {name}"), model.num_layers
        )


def norms(model: config.Decoder, tokens: int, device: torch.device, tiles: bool) -> Iterator[Part]:
    """Yield the norm of a sum, and its backward.

    Their x is the two summands, or the gradient of the norm's output, that of the sum, and the sum.
    """
    shape, known, casts = (tokens, model.hidden_size), RowNorm(), BlockCast()
    x, gain = torch.randn(3, *shape, device=device).to(BF16), torch.rand(model.hidden_size, device=device).to(BF16)
    packed = pack_fields(Normed, known.p, known.centers, known.eps, False), checked_casts(shape, None, UNREAD, casts)
    rms = x[2].float().square().mean(-1, keepdim=True).add(known.eps).sqrt()

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x[0] + x[1]
        inverse = total.float().square().mean(-1, keepdim=True).add(known.eps).rsqrt()
        return total, (total.float() * inverse * gain.float()).to(BF16)

    def ours(x: Tensor, **tile: Tile) -> object:
        if tile:
            return norm_cast.launch_cuda(x[0], x[1], gain, None, *packed, **tile)
        return norm_cast.norm_cast_both(x[0], gain, known, None, UNREAD, casts, branch=x[1])

    calls, numbers = beside(forward, ours, tiles, "norm forward", model.hidden_size), tokens * model.hidden_size
    yield Part("norm forward", x[:2], 4 * 2 * numbers, calls, model.num_layers)

    def backward(x: Tensor) -> tuple[Tensor, Tensor]:
        dy, xbar = x[0].float(), x[2].float() / rms
        dxbar = dy * gain.float()
        dx = (dxbar - xbar * (dxbar * xbar).mean(-1, keepdim=True)) / rms
        return x[1] + dx.to(BF16), (dy * xbar).sum(0)

    def ours_back(x: Tensor, **tile: Tile) -> tuple[Tensor, Tensor]:
        call = partial(norm_backward.launch_cuda, **tile) if tile else norm_backward.norm_backward_add
        return call(x[0], x[2], None, rms, gain, x[1], sums=1)

    calls = beside(backward, ours_back, tiles, "norm backward", model.hidden_size)
    yield Part("norm backward", x, 4 * 2 * numbers, calls, 2 * model.num_layers)


def rotary(model: config.Decoder, tokens: int, device: torch.device, tiles: bool, length: int) -> Iterator[Part]:
    """Yield the rotation of queries and keys, and its backward. Their x is qkv, or dq, dk and dv one after another."""
    size = model.head_size
    counts = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    turned, stride = size * sum(counts[:2]), size * sum(counts)
    rope = torch.arange(length, device=device)[:, None] * 10.0 ** -torch.linspace(0, 4, size // 2, device=device)
    x = torch.randn(tokens, stride, device=device).to(BF16)

    def forward(x: Tensor) -> list[Tensor]:
        parts = x[:, :turned].unflatten(0, (-1, length)).unflatten(-1, (-1, size)).split(list(counts[:2]), dim=2)
        return [rotate(part, rope) for part in parts]

    def in_place(x: Tensor, **tile: Tile) -> None:
        (heads.launch_cuda_rotate if tile else torch.ops.mxstudy.rotate_heads_)(x, rope, turned, size, **tile)

    calls = beside(forward, in_place, tiles, "rotary bf16")
    yield Part("rotary forward", x, tokens * turned * 2 * 2, calls, model.num_layers)

    def gradients(x: Tensor) -> list[Tensor]:
        flat = x.flatten().split([tokens * size * count for count in counts])
        return [one.view(-1, length, count, size) for one, count in zip(flat, counts, strict=True)]

    for name, formats in CASTS.items():
        row, column = formats
        casts = checked_casts((tokens, stride), row, column, BlockCast())

        def backward(x: Tensor, formats: Formats = formats) -> tuple[Tensor, Tensor]:
            dq, dk, dv = gradients(x)
            back = (rotate_back(dq, rope), rotate_back(dk, rope), dv)
            return plainly_cast(torch.cat([one.flatten(2).flatten(0, 1) for one in back], dim=-1), formats)

        def ours(x: Tensor, casts: str = casts, **tile: Tile) -> tuple[Tensor, Tensor]:
            call = heads.launch_cuda if tile else torch.ops.mxstudy.heads_cast_both
            return call(*gradients(x), rope, casts, **tile)

        moved = tokens * stride * 2 * (2 + (1 if row else 0))
        yield Part(
            f"rotary backward, {name}", x, moved, beside(backward, ours, tiles, f"rotary {name}"), model.num_layers
        )


def cross_entropy(model: config.Decoder, tokens: int, device: torch.device, tiles: bool) -> Iterator[Part]:
    """Yield the cross-entropies of as many logits as are in memory at once; their gradient takes the logits' place."""
    columns = model.vocab_size
    rows = tokens_at_once(Linear(Gemms()), tokens, columns)
    x = torch.randn(rows, columns, device=device).to(BF16)
    targets = torch.randint(columns, (rows,), device=device)

    def composed(x: Tensor) -> tuple[Tensor, Tensor]:
        log_p = x.float().log_softmax(-1)
        of_target = torch.arange(columns, device=device) == targets[:, None]
        return -log_p.gather(-1, targets[:, None]), (log_p.exp() - of_target.float()).to(BF16)

    def ours(x: Tensor, **tile: Tile) -> Tensor:
        return (launch_cuda if tile else cross_entropy_)(x, targets, 1.0, **tile)

    calls = beside(composed, ours, tiles, "cross-entropy")
    yield Part("cross-entropy", x, 2 * x.nbytes, calls, -(-tokens // rows))


def beside(
    composed: Callable[[Tensor], object],
    ours: Callable[..., object],
    tiles: bool,
    which: str,
    most_columns: int = 2**30,
) -> Calls:
    """Return the calls of a part: Inductor with its own settings, our kernel, and our kernel with other tiles.

    most_columns: a wider tile is cut to it.
    """
    calls: dict[str, Callable[[Tensor], object]] = {"inductor": torch.compile(composed, dynamic=False), "ours": ours}
    others = [tile._replace(columns=min(tile.columns, most_columns)) for tile in TILES[which]] if tiles else []
    return calls | {f"ours, {' x '.join(map(str, tile))}": partial(ours, tile=tile) for tile in others}


def plainly_cast(x: Tensor, formats: Formats) -> tuple[Tensor, Tensor]:
    """Return both operands of x by PyTorch's operations, or x twice if it is not cast."""
    if formats[0] is None:
        return x, x
    return operand(x, formats[0], -1, BlockCast()), operand(x, formats[1], -2, BlockCast())


def stepped(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    optimizer.step()


def of_weights(model: config.Decoder, tokens: int, device: torch.device) -> Iterator[Part]:
    """Yield clipping, AdamW and the embedding's gradient, in FP32 as in the step."""
    with torch.device("meta"):
        decoder: nn.Module = Decoder(model, config.RMSNorm(), BlockCast(), BF16)
    decoder.to_empty(device=device)
    weights = list(decoder.parameters())
    for weight in weights:
        weight.data.normal_(std=0.02)
        weight.grad = torch.full_like(weight, 1e-6)
    size = sum(weight.numel() for weight in weights)
    x = torch.zeros(1, device=device)
    clips = {
        "torch's, ours": lambda _: clip_grad_norm_(weights, 1e9),
        "one after another": lambda _: clip_grad_norm_(weights, 1e9, foreach=False),
    }
    yield Part("clip", x, 3 * 4 * size, clips, 1)  # it multiplies even where the norm is short enough, by 1
    settings = config.AdamW(lr=1e-5)
    optimizers = {"fused, ours": build_optimizer(decoder, settings)}
    optimizers["foreach"] = torch.optim.AdamW(weights, lr=1e-5, betas=settings.betas, weight_decay=0.1, foreach=True)
    adamws = {name: partial(stepped, optimizer) for name, optimizer in optimizers.items()}
    yield Part("adamw", x, 7 * 4 * size, adamws, 1)
    ids = torch.randint(model.vocab_size, (tokens,), device=device)
    dx = torch.randn(tokens, model.hidden_size, device=device).to(BF16)
    least = dx.numel() * 2 + model.vocab_size * model.hidden_size * 4
    calls = {"torch's, ours": lambda dx: aten.embedding_dense_backward(dx.float(), ids, model.vocab_size, -1, False)}
    yield Part("embedding gradient", dx, least, calls, 1)


def row_of(part: Part, by: str, us: float, copied_per_us: float) -> dict[str, Any]:
    rate = part.moved / us
    about = {"part": part.name, "by": by, "us": us, "bytes": part.moved, "tb_per_s": rate / 1e6}
    return about | {"of_copy": rate / copied_per_us, "ms_of_step": us * part.times / 1e3}


def rows_of_kernels(part: Part, budget_s: float) -> list[dict[str, Any]]:
    """Return a row per call. A copy of the part's bytes takes turns with the calls."""
    calls = {"copy": torch.clone, **part.calls}
    times = microseconds(calls, part.x, 2 * part.x.nbytes, budget_s * len(calls))
    copied_per_us = 2 * part.x.nbytes / times["copy"].median
    return [row_of(part, by, us.median, copied_per_us) for by, us in times.items() if by != "copy"]


def rows_of_weights(part: Part, copied: Tensor) -> list[dict[str, Any]]:
    """Return a row per call of a part that takes milliseconds. Some of these calls allow no CUDA graph."""
    calls: dict[str, Callable[[], object]] = {"copy": copied.clone}
    calls |= {by: partial(call, part.x) for by, call in part.calls.items()}

    def several(call: Callable[[], object]) -> None:
        for _ in range(REPEATS):
            call()

    def once(call: Callable[[], object]) -> float:
        if copied.is_cuda:
            return once_us(partial(several, call)) / REPEATS
        began_s = time.perf_counter()
        several(call)
        return (time.perf_counter() - began_s) * 1e6 / REPEATS

    rounds = [{by: once(call) for by, call in calls.items()} for _ in range(ROUNDS + 1)][1:]
    times = {by: float(np.median([each[by] for each in rounds])) for by in calls}
    copied_per_us = 2 * copied.nbytes / times["copy"]
    return [row_of(part, by, us, copied_per_us) for by, us in times.items() if by != "copy"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("parts", __doc__)
    parser.add_argument("--model", choices=LLAMAS, default="llama_1b", metavar="MODEL", help="a file of conf/model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sequences", type=int, help="per step; default: as benchmarks.train_step")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--tiles", action="store_true", help="also measure our kernels' other tiles; on a GPU only")
    parser.add_argument("--seconds", type=float, default=0.5, help="time per case")
    device_option(parser)
    chosen = parser.parse_args(arguments)
    device, model = resolve_device(chosen.device), model_of(chosen.model)
    if chosen.tiles and device.type != "cuda":
        parser.error("--tiles: tiles are of kernels, which need a CUDA GPU")
    tokens = (chosen.sequences or BATCH_SIZES.get(chosen.model, 8)) * chosen.length
    rows: list[dict[str, Any]] = []

    def add(found: list[dict[str, Any]]) -> None:
        show(found)
        rows.extend(found)
        settings = {"model": chosen.model, "tokens": tokens, "length": chosen.length, "device": device.type}
        measured(rows, chosen.json, **settings)

    kernels: dict[str, Callable[..., Iterator[Part]]] = {
        "swiglu": swiglu,
        "norm": norms,
        "rotary": partial(rotary, length=chosen.length),
        "cross-entropy": cross_entropy,
    }
    for name in (name for name in kernels if name in chosen.parts):
        for part in kernels[name](model, tokens, device, chosen.tiles):
            add(rows_of_kernels(part, chosen.seconds))
    if "weights" in chosen.parts:
        copied = torch.zeros(2**28 if device.type == "cuda" else 2**20, device=device)
        for part in of_weights(model, tokens, device):
            add(rows_of_weights(part, copied))


if __name__ == "__main__":
    main()
