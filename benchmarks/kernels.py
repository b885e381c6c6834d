"""Measure norm and MX cast of bf16 rows to codes and scales: MXNorm (p = 2) and RMSNorm, torch.compile and our kernel.

The grid is that of the MXNorm paper, appendix H.1. Columns are in microseconds:

    floor             the fastest of several kernels that only move as many bytes
    alike             the fastest of those that read and write as many bytes each as the cast; the other reads half
    ..._one_pass      `mxstudy.kernels.norm_codes`
    ..._compiled      plain PyTorch (`benchmarks.plain_norms`) under torch.compile, the fastest mode of --compile:
                      "dynamic" compiles once per hidden size, block size and format for any number of tokens, and tunes
                      on the largest number; "static" compiles and tunes for every number of tokens, "autotuned" with
                      Inductor's max-autotune; "eager" does not compile. dynamic, the default, compiles in minutes.
    torchao_compiled  torch's RMSNorm and torchao's cast, compiled in the same modes

A finished case is written at once, beside the JSON, and not measured again with the same code, GPU and --compile. So
another call continues where --seconds cut off the last one. Everything is compiled, in parallel, before it is measured.

python -m benchmarks.kernels [--json runs/kernels.json] [--formats E4M3 E2M1] [--blocks 16 32 64] [--seconds 500]
                             [--compile dynamic static autotuned] [--hidden 1024 4096 16384] [--tokens 4096 65536]
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch

from benchmarks.compilers import MODES, OURS, Compilers, Plain, compiled
from benchmarks.floor import EVEN, copies, moved_bytes
from benchmarks.kept import Kept
from benchmarks.report import device_option, measured, options_of, show
from benchmarks.timing import Calls, Microseconds, microseconds
from mxstudy.kernels import norm_codes
from mxstudy.numerics.cast import BlockCast
from mxstudy.train.runtime import resolve_device

TOKENS = tuple(2**e for e in range(12, 17))
HIDDEN = tuple(sorted({k * 2**r for k in (1, 3, 5, 7) for r in range(15) if 2**10 <= k * 2**r <= 2**14}))
LARGE = 2**25
CHOICE_S = 0.05  # for choosing the fastest copy kernel
RATIOS = {  # {name: (numerator, denominator)}, both the median of a column
    "mxnorm_of_floor": ("floor", "mxnorm_one_pass"),
    "mxnorm_of_alike": ("alike", "mxnorm_one_pass"),
    "rmsnorm_of_floor": ("floor", "rmsnorm_one_pass"),
    "over_compiled_rmsnorm": ("rmsnorm_compiled", "mxnorm_one_pass"),
    "over_one_pass_rmsnorm": ("rmsnorm_one_pass", "mxnorm_one_pass"),
    "one_pass_rmsnorm_over_compiled": ("rmsnorm_compiled", "rmsnorm_one_pass"),
    "compiled_over_compiled_rmsnorm": ("rmsnorm_compiled", "mxnorm_compiled"),
    "over_torchao": ("torchao_compiled", "mxnorm_one_pass"),
    "one_pass_rmsnorm_over_torchao": ("torchao_compiled", "rmsnorm_one_pass"),
}


class Group(NamedTuple):
    """The settings that share compiled code."""

    format: str
    block_size: int
    hidden_size: int


def measure_case(group: Group, x: torch.Tensor, peers: Mapping[str, Plain], budget_s: float) -> dict[str, Any]:
    """Return a row of the table for x [tokens, hidden] bf16, with `peers` {"PEER MODE": function}."""
    fmt, block_size = group.format, group.block_size
    floors, moved = copies(x, fmt, block_size), moved_bytes(x, fmt, block_size)
    alike = fastest_of({name: call for name, call in floors.items() if name != EVEN} or floors, x, moved)
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        f"floor {name}": floors[name] for name in dict.fromkeys((EVEN, alike))
    }
    for name, norm in OURS.items():
        calls[f"{name}_one_pass"] = partial(norm_codes, norm=norm, fmt=fmt, cast=BlockCast(block_size))
    for name, peer in peers.items():
        calls[name.replace(" ", "_compiled ")] = peer
    us = microseconds(calls, x, moved, budget_s)
    return row(group, x, us | {"alike": us[f"floor {alike}"]})


def fastest_of(calls: Calls, x: torch.Tensor, moved: int) -> str:
    if len(calls) == 1:
        return next(iter(calls))
    us = microseconds(calls, x, moved, CHOICE_S)
    return min(us, key=lambda name: us[name].median)


def row(group: Group, x: torch.Tensor, us: dict[str, Microseconds]) -> dict[str, Any]:
    """Return a row of the table from the times `us` of its calls.

    A call is named by its column, or 'COLUMN VARIANT'. The fastest variant counts.
    """
    best: dict[str, str] = {}
    for call in us:
        column = call.split()[0]
        if column not in best or us[call].median < us[best[column]].median:
            best[column] = call
    times = {column: us[call] for column, call in best.items()}
    return {
        **group._asdict(),
        "tokens": len(x),
        "bytes": moved_bytes(x, group.format, group.block_size),
        **{f"{column}_by": call.partition(" ")[2] for column, call in best.items() if " " in call},
        **{f"{column}_{part}us": value for column, each in times.items() for part, value in parts(each).items()},
        **{ratio: times[top].median / times[bottom].median for ratio, (top, bottom) in RATIOS.items()},
    }


def parts(times: Microseconds) -> dict[str, float]:
    return {"": times.median, "q1_": times.q1, "q3_": times.q3}


def of_cast(row: dict[str, Any]) -> tuple[str, int]:
    return row["format"], row["block_size"]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return geometric means of the ratios by format and block size, over all cases and over those from LARGE on."""
    means = []
    for cast in dict.fromkeys(map(of_cast, rows)):
        cases = [row for row in rows if of_cast(row) == cast]
        large = [row for row in cases if row["tokens"] * row["hidden_size"] >= LARGE]
        for which, chosen in (("all", cases), (f"{LARGE} elements and more", large)):
            if chosen:
                about = {"format": cast[0], "block_size": cast[1], "cases": len(chosen), "of": which}
                ratios = {name: geometric_mean(r[name] for r in chosen) for name in RATIOS}
                means.append(about | ratios | {"least_mxnorm_of_floor": min(r["mxnorm_of_floor"] for r in chosen)})
    return means


def inputs(group: Group, tokens: int, device: torch.device) -> torch.Tensor:
    """Return random x [tokens, hidden] bf16, with the same numbers for all formats and block sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    generator = torch.Generator(device).manual_seed(tokens)
    return torch.randn(tokens, group.hidden_size, device=device, dtype=torch.bfloat16, generator=generator)


def batches(formats: Sequence[str], blocks: Sequence[int], hidden: Sequence[int]) -> Iterator[list[Group]]:
    for fmt in formats:
        for block_size in blocks:
            yield [Group(fmt, block_size, size) for size in hidden]


def main(arguments: Sequence[str] | None = None) -> None:
    began_s = time.monotonic()
    parser = options_of("kernels", __doc__)
    parser.add_argument("--formats", nargs="+", choices=["E4M3", "E2M1"], default=["E4M3", "E2M1"])
    parser.add_argument("--blocks", type=int, nargs="+", choices=[16, 32, 64], default=[32, 16, 64])
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--compile", nargs="+", choices=MODES, default=["dynamic"])
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="compilers side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no new case after this time")
    parser.add_argument("--case-seconds", type=float, default=0.2, help="time to measure a case")
    device_option(parser)
    chosen = parser.parse_args(arguments)
    device = resolve_device(chosen.device)
    done = Kept(chosen.json, device)
    settings = {"compile": " ".join(mode for mode in MODES if mode in chosen.compile)}
    tokens = sorted(chosen.tokens, reverse=True)

    def is_over() -> bool:
        return time.monotonic() - began_s > chosen.seconds

    def is_done(group: Group, tokens: int) -> bool:
        return done.has(**settings, **group._asdict(), tokens=tokens)

    with Compilers(chosen.workers if device.type == "cuda" else 0) as compilers:
        for batch in batches(chosen.formats, chosen.blocks, chosen.hidden):
            todo = [group for group in batch if not all(is_done(group, each) for each in tokens)]
            if todo and not is_over():
                compilers.compile(todo, tokens, chosen.compile, chosen.seconds + began_s)
            for group in todo:
                peers = compiled(group.format, group.block_size, chosen.compile)
                for number in tokens:
                    if not is_over() and not is_done(group, number):
                        x = inputs(group, number, device)
                        done.add(settings | measure_case(group, x, peers, chosen.case_seconds))
            show(summary([row for row in done.rows_with(**settings) if of_cast(row) == batch[0][:2]]))
    rows = done.rows_with(**settings)
    print(f"{len(rows)} cases measured on {done.where}{'; time is up' if is_over() else ''}")
    means = summary(rows)
    show(means)
    measured(rows, chosen.json, device=device.type, compiled_as=chosen.compile, geometric_means=means)


if __name__ == "__main__":
    main()
