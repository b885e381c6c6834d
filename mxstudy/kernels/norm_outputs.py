"""What a norm's output is like: its mean square, and its histogram, by kernels that read the norm's input once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy.kernels.norm_cast import RowNorm, norm_arguments, row_tile
from mxstudy.kernels.operators import Tile, ceil_power_of_two, checked_casts, constants, launch
from mxstudy.numerics.cast import BlockCast

PROGRAMS = 1056  # of the histograms' kernel: eight for each multiprocessor of an H100


class Bins(NamedTuple):
    """The bins of a histogram, symmetric about 0: `per_octave` bins from each power of two to the next.

    The first ends at 2^`smallest_exponent`; `edges`: number of finite edges on either side. `starts`: the float32
    mantissas at which bins within an octave begin.
    """

    smallest_exponent: int
    per_octave: int
    edges: int
    starts: tuple[int, ...]

    @property
    def number(self) -> int:
        return 2 * self.edges + 1

    @property
    def size(self) -> int:
        """Return a power of two that is larger than the number of bins."""
        return ceil_power_of_two(self.number + 1)


def norm_mean_squares(x: Tensor, norm: RowNorm, fmt: str | None, cast: BlockCast, tile: Tile | None = None) -> Tensor:
    """Return the mean squares of the norm's output and of the exact norm's output, over all elements: float32 [2].

    x [..., columns], bf16 or float32. The output is x / rms, without the gain; it is cast in blocks along the row if
    there is a format. MXNorm takes the absmax of the cast's blocks. Needs a GPU, or Triton's interpreter. `tile`: other
    than the usual one. Raises ConfigError as `checked_casts` does.
    """
    from mxstudy.kernels.device.norm_outputs import norm_squares_kernel

    x, rows, known = prepared(x, norm, fmt, cast, tile)
    squares = x.new_empty((2, rows), dtype=torch.float32)
    launch(norm_squares_kernel, (-(-rows // known["TILE"].rows),), (x, squares, rows), known["TILE"].warps, **known)
    return squares.mean(1)


def norm_bins(
    x: Tensor, norm: RowNorm, fmt: str | None, cast: BlockCast, bins: Bins, tile: Tile | None = None
) -> Tensor:
    """Return histograms of the norm's input and output, int64 [2, bins.number]; arguments as in `norm_mean_squares`."""
    from mxstudy.kernels.device.norm_outputs import norm_bins_kernel

    x, rows, known = prepared(x, norm, fmt, cast, tile)
    tiles = -(-rows // known["TILE"].rows)
    programs = min(PROGRAMS, tiles)
    counts, known = x.new_empty((programs, 2, bins.size), dtype=torch.int32), known | {"TURNS": -(-tiles // programs)}
    launch(norm_bins_kernel, (programs,), (x, counts, rows), known["TILE"].warps, BINS=bins, **known)
    return counts.sum(0)[:, : bins.number]


def prepared(
    x: Tensor, norm: RowNorm, fmt: str | None, cast: BlockCast, tile: Tile | None
) -> tuple[Tensor, int, dict[str, Any]]:
    """Return x, contiguous, its number of rows, and the constants for which both kernels are compiled."""
    casts, columns = constants(checked_casts(x.shape, fmt, None, cast)), x.shape[-1]
    known = norm_arguments(norm, casts.block) | {
        "COLUMNS": columns,
        "TILE": tile or row_tile(columns),
        "CAST": casts,
    }
    return x.contiguous(), x.numel() // columns, known
