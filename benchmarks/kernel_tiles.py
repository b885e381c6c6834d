"""Measure the tiles of `norm_codes`: microseconds and share of the floor for its usual tile and for all possible ones.

A tile is rows per program x width of the chunks of a row x warps. This runs on a GPU only.

python -m benchmarks.kernel_tiles [--hidden 1024 4096 16384] [--tokens 16384] [--formats E4M3 E2M1] [--json PATH]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.compilers import OURS
from benchmarks.floor import copies, moved_bytes
from benchmarks.report import measured, options_of, show
from benchmarks.timing import microseconds
from mxstudy.kernels.norm_codes import CHUNKS, WARP, RowTile, encoding, launch_cuda, row_tile
from mxstudy.numerics.cast import BlockCast

ELEMENTS_OF_THREAD = range(32, 161)


def tiles(columns: int, block_size: int) -> Iterator[RowTile]:
    """Yield tiles with at most CHUNKS chunks, 32 to 160 elements per thread, and each span within one chunk."""
    padded = 1 << (columns - 1).bit_length()
    for chunk in (padded // CHUNKS, padded * 2 // CHUNKS, padded * 4 // CHUNKS, padded):
        for rows in (1, 2, 4, 8):
            for warps in (1, 2, 4, 8, 16):
                elements = rows * (-(-columns // chunk) * chunk) // (32 * warps)
                if chunk >= block_size and rows * chunk >= warps * WARP and elements in ELEMENTS_OF_THREAD:
                    yield RowTile(rows, chunk, warps)


def measure(x: torch.Tensor, norm: str, fmt: str, block_size: int, budget_s: float) -> list[dict[str, Any]]:
    """Return a row per tile, the fastest first."""
    usual = row_tile(x.shape[-1], block_size)
    packed = encoding(OURS[norm], fmt, BlockCast(block_size, "rceil", "even", False))
    tiled = partial(launch_cuda, branch=None, tensor_scale=None, packed=packed)
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        " x ".join(map(str, tile)): partial(tiled, tile=tile) for tile in {usual, *tiles(x.shape[-1], block_size)}
    }
    floors, moved = copies(x, fmt, block_size), moved_bytes(x, fmt, block_size)
    us = microseconds({**calls, **{f"floor {name}": call for name, call in floors.items()}}, x, moved, budget_s)
    floor = min(us[f"floor {name}"].median for name in floors)
    about = {"norm": norm, "format": fmt, "block_size": block_size, "tokens": len(x), "hidden_size": x.shape[-1]}
    rows = [
        about
        | {"tile": name, "usual": name == " x ".join(map(str, usual)), "us": us[name].median}
        | {"spread_us": (us[name].q3 - us[name].q1) / 2, "of_floor": floor / us[name].median}
        for name in calls
    ]
    return sorted(rows, key=lambda row: row["us"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("kernel_tiles", __doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 2048, 4096, 7168, 16384])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--formats", nargs="+", choices=["E4M3", "E2M1"], default=["E4M3", "E2M1"])
    parser.add_argument("--block", type=int, choices=[16, 32, 64], default=32)
    parser.add_argument("--norms", nargs="+", choices=OURS, default=["mxnorm"])
    parser.add_argument("--case-seconds", type=float, default=0.5, help="time to measure all tiles of a shape")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU, and there is none here")
    rows = []
    for fmt in chosen.formats:
        for hidden in chosen.hidden:
            for tokens in chosen.tokens:
                x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
                for norm in chosen.norms:
                    tile_rows = measure(x, norm, fmt, chosen.block, chosen.case_seconds)
                    show([row for i, row in enumerate(tile_rows) if i < 5 or row["usual"]])
                    rows += tile_rows
    measured(rows, chosen.json)


if __name__ == "__main__":
    main()
