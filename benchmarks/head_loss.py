"""Measure the head and its loss, forward and backward, in bf16: whole logits, chunks, libraries' peers, and the floor.

    whole, compiled    mx_linear, then cross-entropy under torch.compile
    whole, eager       the same as torch runs it; at the usual sizes it needs 70 GiB
    chunks of 2^N      `mxstudy.blocks.linear_cross_entropy` with at most so many logits at once
    liger              Liger's fused linear cross-entropy with dW summed in FP32, with its usual chunks, and with chunks
                       of eight times as many tokens
    torch              torch's F.linear_cross_entropy, where torch has one

The floor is the time of the three GEMMs alone, in our chunks, plus that of one read and one write of all logits at a
copy's bandwidth. All arms take turns. Peak memory is what a call needs beside its inputs. Losses and gradients are
compared with those of whole logits in eager mode. A second table measures the kernel of cross-entropies alone, on one
chunk: `of_copy` is its share of a copy's bandwidth, for one read of the chunk and, with a gradient, one write. sm_mhz,
power_w and temperature_c are the least, median and largest reading within the arm's calls.

python -m benchmarks.head_loss [--tokens 32768] [--hidden 2048] [--vocabulary 128256 32000] [--json PATH]
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_log import GpuLog, shown
from benchmarks.report import device_option, measured, options_of, show
from benchmarks.timing import Timed, bandwidth, median_and_spread, timed
from mxstudy.blocks import linear_cross_entropy as ours
from mxstudy.config.casts import Gemms
from mxstudy.kernels.cross_entropy import TILE, launch_cuda
from mxstudy.kernels.operators import Tile
from mxstudy.numerics.gemms import Linear, add_gemm_fp32, mx_linear
from mxstudy.train.runtime import configure_torch, resolve_device

LEAST_ROUNDS = 9
AT_ONCE = [2**exponent for exponent in (27, 28, 29, 30)]  # elements of a chunk of logits
TILES = [TILE, Tile(1, 16384, 16), Tile(1, 8192, 16), Tile(1, 8192, 8), Tile(1, 4096, 8), Tile(1, 4096, 4)]
PLAIN = Linear(Gemms())


class Inputs(NamedTuple):
    """The head's input and its weight, bf16 leaves, and the targets."""

    x_TI: Tensor
    weight_VI: Tensor
    targets_T: Tensor


Loss = Callable[[Inputs], Tensor]


def drawn(tokens: int, hidden: int, vocabulary: int, device: torch.device) -> Inputs:
    """Return random inputs whose logits have a standard deviation of 1."""
    generator = torch.Generator(device).manual_seed(0)
    x_TI = torch.randn(tokens, hidden, device=device, generator=generator)
    weight_VI = torch.randn(vocabulary, hidden, device=device, generator=generator) * hidden**-0.5
    targets_T = torch.randint(0, vocabulary, (tokens,), device=device, generator=generator)
    return Inputs(x_TI.bfloat16().requires_grad_(), weight_VI.bfloat16().requires_grad_(), targets_T)


# --------------------------------------------------------------------------------------------------------------- arms


def token_loss(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV.float(), targets_T, reduction="sum")


def whole(inputs: Inputs, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    logits_TV = mx_linear(inputs.x_TI, inputs.weight_VI, PLAIN)
    return loss_of(logits_TV, inputs.targets_T) / len(inputs.targets_T)


def chunked(inputs: Inputs, most: int) -> Tensor:
    return ours.linear_cross_entropy(*inputs, PLAIN, len(inputs.targets_T), most)


def liger(inputs: Inputs, times: int) -> Tensor:
    """Return Liger's mean loss, with chunks of `times` as many tokens as usual."""
    from liger_kernel.transformers.functional import (  # type: ignore[import-not-found]
        liger_fused_linear_cross_entropy as loss_of,
    )

    return loss_of(*inputs, accum_dtype=torch.float32, chunk_mem_const=times)


def of_torch(inputs: Inputs) -> Tensor:
    return F.linear_cross_entropy(*inputs)


def arms_of(device: torch.device, compiled: bool) -> dict[str, Loss]:
    """Return {arm: its loss}, whole logits in eager mode first, and print which peers are missing."""
    arms: dict[str, Loss] = {"whole, eager": partial(whole, loss_of=token_loss)}
    if compiled:
        arms["whole, compiled"] = partial(whole, loss_of=torch.compile(token_loss, dynamic=False))
    for size in AT_ONCE:
        usual = ", usual" if size == ours.LOGITS_AT_ONCE else ""
        arms[f"chunks of 2^{size.bit_length() - 1}{usual}"] = partial(chunked, most=size)
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        arms |= {"liger": partial(liger, times=1), "liger, 8 times as many": partial(liger, times=8)}
    else:
        print("without Liger, which is not installed or has no GPU: pip install --no-deps liger-kernel")
    if hasattr(F, "linear_cross_entropy"):
        arms["torch"] = of_torch
    else:
        print(f"without F.linear_cross_entropy, which torch {torch.__version__} does not have")
    return arms


# -------------------------------------------------------------------------------------------------------------- timing


def step(inputs: Inputs, loss_of: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients with respect to x and the weight, as a training step needs them."""
    loss = loss_of(inputs)
    dx_TI, dweight_VI = torch.autograd.grad(loss, (inputs.x_TI, inputs.weight_VI), ours.unit_gradient(loss.device))
    return loss.detach(), dx_TI, dweight_VI


def floor_gemms(inputs: Inputs, gradient_VI: Tensor) -> None:
    """Do the three GEMMs of a chunked head and nothing else. The logits stand for their gradient."""
    size = ours.tokens_at_once(PLAIN, len(inputs.x_TI), len(inputs.weight_VI))
    with torch.no_grad():
        for x in inputs.x_TI.split(size):
            logits = x @ inputs.weight_VI.T
            logits @ inputs.weight_VI
            if x.is_cuda:
                add_gemm_fp32(gradient_VI, logits.T, x)
            else:
                logits.T @ x


def measure(inputs: Inputs, arms: dict[str, Loss], copied_per_s: float, least_s: float) -> list[dict[str, Any]]:
    """Return a row per arm, from rounds in which all arms take turns."""
    device = inputs.x_TI.device
    gradient_VI = torch.zeros(inputs.weight_VI.shape, device=device)
    calls: dict[str, Callable[[], object]] = {name: partial(step, inputs, loss_of) for name, loss_of in arms.items()}
    calls["GEMMs alone"] = partial(floor_gemms, inputs, gradient_VI)
    errors = errors_of(inputs, arms)
    rounds: list[list[Timed]] = []
    began_s = time.perf_counter()
    with GpuLog(device) as log:
        while len(rounds) < LEAST_ROUNDS or time.perf_counter() - began_s < least_s * len(calls):
            rounds.append([timed(call, device) for call in calls.values()])
    of_arms = [list(own) for own in zip(*rounds, strict=True)]
    seconds = np.array([[each.seconds for each in own] for own in of_arms])  # [arms, rounds]
    (tokens, hidden), vocabulary = inputs.x_TI.shape, len(inputs.weight_VI)
    floor_s = seconds[-1] + 2 * 2 * tokens * vocabulary / copied_per_s
    before_s = seconds[list(calls).index("whole, compiled" if "whole, compiled" in calls else "whole, eager")]
    rows = []
    for name, own_s, own in zip(arms, seconds, of_arms, strict=False):
        middle_s, spread_s = median_and_spread(own_s)
        rows.append(
            {
                "vocabulary": vocabulary,
                "hidden": hidden,
                "tokens": tokens,
                "arm": name,
                "ms": middle_s * 1e3,
                "spread_ms": spread_s * 1e3,
                "over_whole": median_and_spread(own_s / before_s)[0],
                "over_floor": median_and_spread(own_s / floor_s)[0],
                "floor_ms": float(np.median(floor_s)) * 1e3,
                "gemms_ms": float(np.median(seconds[-1])) * 1e3,
                "peak_gib": max(each.peak_gib - each.before_gib for each in own) if device.type == "cuda" else None,
                **errors[name],
                "rounds": len(rounds),
                **log.over([each.span for each in own]),
            }
        )
    return rows


def errors_of(inputs: Inputs, arms: dict[str, Loss]) -> dict[str, dict[str, float]]:
    """Warm up, and return each arm's relative differences to the first one, of the loss and of both gradients."""
    wanted = step(inputs, next(iter(arms.values())))
    names = ("loss_error", "dx_error", "dw_error")
    return {
        name: dict(zip(names, map(relative, step(inputs, loss_of), wanted), strict=True))
        for name, loss_of in arms.items()
    }


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference divided by the norm of `wanted`."""
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def kernel_rows(vocabulary: int, device: torch.device, copied_per_s: float) -> list[dict[str, Any]]:
    """Return a row per tile for the kernel of cross-entropies alone, on one chunk of logits of the usual size."""
    tokens = ours.tokens_at_once(PLAIN, 2**20, vocabulary)
    logits_TV = torch.randn(tokens, vocabulary, device=device, dtype=torch.bfloat16)
    targets_T = torch.randint(0, vocabulary, (tokens,), device=device)
    rows = []
    for tile in TILES:
        for scale in (None, 1.0):
            call = partial(launch_cuda, logits_TV, targets_T, scale, tile)
            call()
            seconds = float(np.median([timed(call, device).seconds for _ in range(LEAST_ROUNDS)]))
            floor_s = (1 + (scale is not None)) * 2 * logits_TV.numel() / copied_per_s
            about = {"vocabulary": vocabulary, "tokens": tokens, "width": tile.columns, "warps": tile.warps}
            rows.append(about | {"gradient": scale is not None, "ms": seconds * 1e3, "of_copy": floor_s / seconds})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("head_loss", __doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[128_256, 32_000])
    parser.add_argument("--seconds", type=float, default=3.0, help="time per arm")
    parser.add_argument("--eager", action="store_true", help="without the compiled arm")
    device_option(parser)
    chosen = parser.parse_args(arguments)
    configure_torch(not chosen.eager)
    device = resolve_device(chosen.device)
    copied_per_s = bandwidth(device, least_s=min(max(chosen.seconds, 0.01), 1.0))
    arms, rows, kernels = arms_of(device, not chosen.eager), [], []
    for vocabulary in chosen.vocabulary:
        rows += measure(drawn(chosen.tokens, chosen.hidden, vocabulary, device), arms, copied_per_s, chosen.seconds)
        if device.type == "cuda":
            kernels += kernel_rows(vocabulary, device, copied_per_s)
    show([shown(row) for row in rows])
    if kernels:
        show(kernels)
    measured(rows, chosen.json, kernels=kernels, copied_bytes_per_s=copied_per_s, tokens_at_once=ours.LOGITS_AT_ONCE)


if __name__ == "__main__":
    main()
