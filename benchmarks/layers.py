"""Time a whole layer with MXNorm and RMSNorm: Llama 3 8B cut to 8 layers, forward only (MXNorm paper, H.2).

Kernel time of a layer comes from torch.profiler and excludes launches. A layer is measured from one attention kernel to
the next, and those that begin in the first two layers do not count. On CPU a layer's time is that of a forward divided
by the number of layers.

    rmsnorm, mxnorm       the norm; its gain is folded into the weights, which are quantised beforehand
    compiled, one_pass    sum with the residual stream, norm and cast by torch.compile, or by `norm_codes`; the rest of
                          the layer is torch.compile's in both
    layer_us              all kernels except decoding: GEMMs are emulated on any GPU, on operands that a separate kernel
                          decodes to bf16 (decode_us); a native GEMM would read the codes and take less time

python -m benchmarks.layers [--json runs/layers.json] [--precisions MXFP8 NVFP4] [--batches 4 8] [--seconds 500]
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kept import Kept
from benchmarks.layer import KERNELS, NORMS, PRECISIONS, SIZES, NormCast, Precision, Size, Weights, layer
from benchmarks.report import device_option, measured, options_of, show
from mxstudy.numerics.cast import fake_quantize
from mxstudy.train.runtime import resolve_device

TOKENS = tuple(2**e for e in range(12, 17))
LEFT_OUT = 2  # first layers that are not counted
KINDS = {
    "attention": "flash|fmha|attention",
    "decode": "decode_kernel",
    "norm": "norm_codes",
    "gemm": "gemm|nvjet|xmma|cutlass|splitk",
}
Arm = tuple[str, str]  # norm, and a key of KERNELS
Forward = Callable[[Tensor, Tensor], object]


def random_weights(size: Size, precision: Precision, device: torch.device) -> list[Weights]:
    """Return random bf16 weights of every layer, with values on the format's grid."""
    qkv = (size.heads + 2 * size.kv_heads) * size.head
    shapes = (qkv, size.hidden), (size.hidden, size.hidden), (2 * size.ffn, size.hidden), (size.hidden, size.ffn)

    def drawn(shape: tuple[int, int]) -> Tensor:
        weight = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
        return fake_quantize(weight, precision.format, precision.block_size)

    return [Weights(*(drawn(shape) for shape in shapes)) for _ in range(size.layers)]


def forward_of(
    arm: Arm, size: Size, precision: Precision, weights: Sequence[Weights], mode: str, device: torch.device
) -> Forward:
    """Return the forward of all layers for x and branch [batch, sequence, hidden]. The layer is compiled once."""
    norm, kernel = arm
    norm_cast: NormCast = KERNELS[kernel](norm, size.hidden, precision)

    def one_layer(x: Tensor, branch: Tensor, weights: Weights, rope: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x, branch, weights, rope, size, precision, norm_cast)

    step = one_layer if mode == "eager" else torch.compile(one_layer, dynamic=False if mode == "static" else None)

    @torch.no_grad()
    def forward(x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        powers = 500_000.0 ** -(torch.arange(size.head // 2, device=device) / (size.head // 2))
        rope = torch.arange(x.shape[1], device=device)[:, None] * powers
        for of_layer in weights:
            if mode == "dynamic":
                for tensor, axes in ((x, (0, 1)), (branch, (0, 1)), (rope, (0,))):
                    torch._dynamo.mark_dynamic(tensor, axes)
            x, branch = step(x, branch, of_layer, rope)
        return x, branch

    return forward


# ------------------------------------------------------------------------------------------------------------ kernels


def profiled(forward: Forward, inputs: tuple[Tensor, Tensor], layers: int) -> list[dict[str, float]]:
    """Return {kind of kernel: microseconds} of each counted layer in one profiled forward."""
    if not inputs[0].is_cuda:
        began_s = time.perf_counter()
        forward(*inputs)
        return [{"rest": (time.perf_counter() - began_s) * 1e6 / layers}]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        forward(*inputs)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return by_layer([(event.name, event.time_range.elapsed_us()) for event in events], layers)


def by_layer(kernels: Sequence[tuple[str, float]], layers: int) -> list[dict[str, float]]:
    """Return {kind of kernel: microseconds} from each attention to the next, without the first LEFT_OUT layers.

    `kernels` are names and microseconds, in the order in which they ran.
    """
    kinds = [kind_of(name) for name, _ in kernels]
    ends = [i for i, kind in enumerate(kinds) if kind == "attention"]
    if len(ends) != layers:
        names = "\n".join(sorted({name for name, _ in kernels}))
        raise RuntimeError(
            f"{len(ends)} attention kernels in {layers} layers: cannot tell where a layer begins among\n{names}"
        )
    counted = []
    for first, last in itertools.pairwise(ends[LEFT_OUT:]):
        of_layer = dict.fromkeys([*KINDS, "rest"], 0.0)
        for kind, (_, us) in zip(kinds[first + 1 : last + 1], kernels[first + 1 : last + 1], strict=True):
            of_layer[kind] += us
        counted.append(of_layer)
    return counted


def kind_of(kernel: str) -> str:
    """Return a kernel's kind.

    The compiler's own, triton_..., are 'rest', because their names list everything around them.
    """
    if kernel.startswith("triton_"):
        return "rest"
    return next((kind for kind, words in KINDS.items() if re.search(words, kernel.lower())), "rest")


# -------------------------------------------------------------------------------------------------------------- cases


def measure_case(
    case: dict[str, Any], forwards: dict[Arm, Forward], size: Size, device: torch.device, profiles: int
) -> list[dict[str, Any]]:
    """Return a row per arm. The arms take turns."""
    shape = (case["batch"], case["tokens"] // case["batch"], size.hidden)
    x, branch = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    layers: dict[Arm, list[dict[str, float]]] = {arm: [] for arm in forwards}
    for forward in forwards.values():
        forward(x, branch)  # compiles
    for _ in range(profiles):
        for arm, forward in forwards.items():
            layers[arm] += profiled(forward, (x, branch), size.layers)
    rows = [case | row(arm, of_arm) for arm, of_arm in layers.items()]
    times = {(each["norm"], each["kernels"]): each["layer_us"] for each in rows}
    for each in rows:
        each["speedup"] = times["rmsnorm", each["kernels"]] / each["layer_us"]
        each["over_compiled_rmsnorm"] = times["rmsnorm", "compiled"] / each["layer_us"]
    return rows


def row(arm: Arm, layers: Sequence[dict[str, float]]) -> dict[str, Any]:
    spent = [sum(us for kind, us in each.items() if kind != "decode") for each in layers]
    q1, median, q3 = np.quantile(spent, [0.25, 0.5, 0.75]).tolist()
    kinds = {f"{kind}_us": float(np.median([each[kind] for each in layers])) for kind in layers[0]}
    about = {"norm": arm[0], "kernels": arm[1], "gemms": "emulated in bf16"}
    return about | {"layer_us": median, "layer_q1_us": q1, "layer_q3_us": q3} | kinds


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return MXNorm's speedups over RMSNorm, by the same kernels and compiled, as geometric means over the cases."""
    means = []
    for precision, kernels in dict.fromkeys((row["precision"], row["kernels"]) for row in rows):
        chosen = [r for r in rows if (r["precision"], r["kernels"], r["norm"]) == (precision, kernels, "mxnorm")]
        ratios = {k: geometric_mean(r[k] for r in chosen) for k in ("speedup", "over_compiled_rmsnorm")}
        means.append({"precision": precision, "mxnorm_by": kernels, "cases": len(chosen)} | ratios)
    return means


def main(arguments: Sequence[str] | None = None) -> None:
    began_s = time.monotonic()
    parser = options_of("layers", __doc__)
    parser.add_argument("--size", choices=SIZES, default="llama3_8b")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8], help="sequences")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--compile", choices=["dynamic", "static", "eager"], default="dynamic")
    parser.add_argument("--profiles", type=int, default=10, help="profiled forwards per case and arm")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no new case after this time")
    device_option(parser)
    chosen = parser.parse_args(arguments)
    device, size = resolve_device(chosen.device), SIZES[chosen.size]
    kept = Kept(chosen.json, device)
    torch._dynamo.config.recompile_limit = 64
    settings = {"size": chosen.size, "compile": chosen.compile}
    for precision in chosen.precisions:
        of_all = settings | {"precision": precision}
        cases = [of_all | {"batch": b, "tokens": t} for t in sorted(chosen.tokens) for b in chosen.batches]
        todo = [case for case in cases if not kept.has(**case)]
        if not todo or time.monotonic() - began_s > chosen.seconds:
            continue
        torch._dynamo.reset()
        weights = random_weights(size, PRECISIONS[precision], device)
        arms = {
            arm: forward_of(arm, size, PRECISIONS[precision], weights, chosen.compile, device)
            for arm in itertools.product(NORMS, KERNELS)
        }
        for case in todo:
            if time.monotonic() - began_s <= chosen.seconds:
                rows = measure_case(case, arms, size, device, chosen.profiles)
                show(rows)
                for each in rows:
                    kept.add(each)
        del weights, arms
    rows = kept.rows_with(**settings)
    means = summary(rows)
    print(f"{len(rows)} rows measured on {kept.where}")
    show(means)
    measured(rows, chosen.json, device=device.type, left_out=LEFT_OUT, geometric_means=means)


if __name__ == "__main__":
    main()
