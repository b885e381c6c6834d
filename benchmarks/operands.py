"""Measure the cost of casts by the general kernel, compared with a copy of the same tensor.

These casts are stochastic, in square blocks, after a Hadamard transform, have FP32 scales (fp8_blockwise), or are those
of NVFP4: the absmax of the tensor, one operand, and both operands from one kernel, with other tiles too (--tiles).

x is bf16 and the weight float32; the cast operand is bf16. over_copy is the median time of a cast over that of a copy
of the same tensor to bf16; both operands write twice as much. All cases take turns, and no input is in the L2 cache.

python -m benchmarks.operands [--rows 32768] [--columns 4096] [--seconds 0.5] [--tiles] [--json PATH]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import device_option, measured, options_of, show
from benchmarks.timing import microseconds
from mxstudy.kernels import cast_any, cast_blocks, cast_one
from mxstudy.kernels.cast_any import absmax_any
from mxstudy.kernels.cast_any_both import cast_any_both, launch_both
from mxstudy.kernels.operand_cast import OperandCast
from mxstudy.kernels.packing import pack
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
NVFP4 = OperandCast("NVFP4", ROWS, 16, scale="E4M3", outer_scale="tensor", chain="training")
NVFP4_COLUMNS = replace(NVFP4, axis=COLUMNS)
TILES = tuple(itertools.product((2048, 4096, 8192, 16384), (2, 4, 8)))  # elements, warps

Calls = dict[str, Callable[[Tensor], object]]


def nvfp4(x: Tensor, tiles: bool) -> Calls:
    """Return the casts of x by NVFP4's training chain. Its absmax is not that of the tensors which are timed."""
    outer = absmax_any(x, NVFP4)
    packed = pack(NVFP4), pack(NVFP4_COLUMNS)

    def tiled(elements: int, warps: int) -> Callable[[Tensor], object]:
        return lambda x: launch_both(x, outer, *packed, elements, warps)

    calls: Calls = {
        "NVFP4, absmax": partial(absmax_any, cast=NVFP4),
        "NVFP4, rows": partial(cast_any, cast=NVFP4, outer=outer),
        "NVFP4, columns": partial(cast_any, cast=NVFP4_COLUMNS, outer=outer),
        "NVFP4, both": partial(cast_any_both, row=NVFP4, column=NVFP4_COLUMNS, outer=outer),
    }
    others = TILES if tiles else ()
    return calls | {f"NVFP4, both, {elements} x {warps}": tiled(elements, warps) for elements, warps in others}


def rows_of(
    name: str, x: Tensor, cases: dict[str, OperandCast], budget_s: float, others: Calls | None = None
) -> list[dict[str, Any]]:
    """Return a row per case. The copy and the kernel of plain casts come first."""
    draws = Draws(*(torch.tensor(words, device=x.device) for words in (stream_key(0, "bench"), (1, 0))))
    calls: Calls = {"copy": lambda x: x.to(torch.bfloat16, copy=True)}
    for axis, axis_name in ((ROWS, "rows"), (COLUMNS, "columns")):
        calls[f"{axis_name}, cast_one"] = partial(cast_one, fmt="E4M3", axis=axis, cast=BlockCast())
    for case, cast in cases.items():
        calls[case] = partial(cast_blocks if cast.scale == "FP32" else cast_any, cast=cast, draws=draws)
    calls |= others or {}
    moved = x.numel() * (x.element_size() + 2)
    times = {case: us.median for case, us in microseconds(calls, x, moved, budget_s * len(calls)).items()}
    return [{"tensor": name, "operand": case, "us": us, "over_copy": us / times["copy"]} for case, us in times.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("operands", __doc__)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=0.5, help="time per case")
    device_option(parser)
    parser.add_argument("--tiles", action="store_true", help="also measure other tiles; on a GPU only")
    chosen = parser.parse_args(arguments)
    device = resolve_device(chosen.device)
    if chosen.tiles and device.type != "cuda":
        parser.error("--tiles: tiles are of kernels, which need a CUDA GPU")
    x = torch.randn(chosen.rows, chosen.columns, device=device).bfloat16()
    weight = torch.randn(chosen.columns, chosen.columns, device=device)
    rows = rows_of("x, bf16", x, OF_X, chosen.seconds, nvfp4(x, chosen.tiles))
    rows += rows_of("weight, float32", weight, OF_WEIGHT, chosen.seconds)
    show(rows)
    measured(rows, chosen.json, shape=[chosen.rows, chosen.columns])


if __name__ == "__main__":
    main()
