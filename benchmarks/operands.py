"""Measure the cost of casts by the general kernel, compared with a copy of the same tensor.

These casts are stochastic, in square blocks, after a Hadamard transform, or have FP32 scales (fp8_blockwise).

x is bf16 and the weight float32; the cast operand is bf16. over_copy is the median time of a cast over that of a copy
of the same tensor to bf16. All cases take turns, and no input is in the L2 cache.

python -m benchmarks.operands [--rows 32768] [--columns 4096] [--seconds 0.5] [--json PATH]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import json_option, measured, show
from benchmarks.timing import microseconds
from mxstudy.kernels import cast_any, cast_blocks, cast_one
from mxstudy.kernels.operand_cast import OperandCast
from mxstudy.numerics import BlockCast
from mxstudy.numerics.random_bits import Draws, stream_key
from mxstudy.train.runtime import resolve_device

ROWS, COLUMNS = -1, -2  # the contraction axis
OF_X = {
    "rows, to nearest": OperandCast("E4M3"),
    "rows, stochastic": OperandCast("E4M3", rounding="stochastic"),
    "columns, to nearest": OperandCast("E4M3", COLUMNS),
    "columns, stochastic": OperandCast("E4M3", COLUMNS, rounding="stochastic"),
    "Hadamard 16, columns, to nearest": OperandCast("E4M3", COLUMNS, transform_size=16),
    "Hadamard 16, columns, stochastic": OperandCast("E4M3", COLUMNS, rounding="stochastic", transform_size=16),
    "Hadamard 128, columns, stochastic": OperandCast("E4M3", COLUMNS, rounding="stochastic", transform_size=128),
    "Hadamard 128, rows, stochastic": OperandCast("E4M3", rounding="stochastic", transform_size=128),
    "FP32 scales of 128, rows": OperandCast("E4M3", ROWS, 128, scale="FP32"),
    "FP32 scales of 128, columns": OperandCast("E4M3", COLUMNS, 128, scale="FP32"),
}
OF_WEIGHT = {
    "16 x 16, rows": OperandCast("E4M3", ROWS, 16, square=True, round_first=True),
    "16 x 16, columns": OperandCast("E4M3", COLUMNS, 16, square=True, round_first=True),
    "FP32 scales of 128 x 128, rows": OperandCast("E4M3", ROWS, 128, square=True, round_first=True, scale="FP32"),
    "FP32 scales of 128 x 128, columns": OperandCast("E4M3", COLUMNS, 128, square=True, round_first=True, scale="FP32"),
}


def rows_of(name: str, x: Tensor, cases: dict[str, OperandCast], budget_s: float) -> list[dict[str, Any]]:
    """Return a row per case. The copy and the kernel of plain casts come first."""
    draws = Draws(*(torch.tensor(words, device=x.device) for words in (stream_key(0, "bench"), (1, 0))))
    calls: dict[str, Callable[[Tensor], object]] = {"copy": lambda x: x.to(torch.bfloat16, copy=True)}
    for axis, axis_name in ((ROWS, "rows"), (COLUMNS, "columns")):
        calls[f"{axis_name}, cast_one"] = partial(cast_one, fmt="E4M3", axis=axis, cast=BlockCast())
    for case, cast in cases.items():
        calls[case] = partial(cast_blocks if cast.scale == "FP32" else cast_any, cast=cast, draws=draws)
    moved = x.numel() * (x.element_size() + 2)
    times = {case: us.median for case, us in microseconds(calls, x, moved, budget_s * len(calls)).items()}
    return [
        {"tensor": name, "operand": case, "us": us, "tb_per_s": moved / us / 1e6, "over_copy": us / times["copy"]}
        for case, us in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=0.5, help="time per case")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    json_option(parser, "operands")
    chosen = parser.parse_args(arguments)
    device = resolve_device(chosen.device)
    x = torch.randn(chosen.rows, chosen.columns, device=device).bfloat16()
    weight = torch.randn(chosen.columns, chosen.columns, device=device)
    rows = rows_of("x, bf16", x, OF_X, chosen.seconds) + rows_of("weight, float32", weight, OF_WEIGHT, chosen.seconds)
    show(rows)
    measured(rows, chosen.json, shape=[chosen.rows, chosen.columns])


if __name__ == "__main__":
    main()
