"""What a cast does to the elements of an operand, by a kernel that reads it once and stores no quantised tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mxstudy.kernels.operators import FORMATS, checked_casts, constants, launch, tile_of
from mxstudy.numerics.cast import BlockCast

SUMS, EXTREMES = 7, 2


class CastCounts(NamedTuple):
    """What `cast_counts` found for one operand, float64.

    `sums` [7]: the numbers of elements above max * scale, that became max, and that were not zero and became zero; the
    sums of squares of the elements and of their errors; the sum of the exponents of the blocks that are not all zeros,
    and the number of these blocks. `extremes` [2]: the largest negated exponent, and the largest exponent. `elements`:
    their number.
    """

    sums: Tensor
    extremes: Tensor
    elements: int


def cast_counts(x: Tensor, fmt: str, axis: int, cast: BlockCast) -> CastCounts:
    """Count what the cast of x [..., rows, columns], bf16 or float32, along `axis`, -2 or -1, does to its elements.

    Needs a GPU, or Triton's interpreter. Raises ConfigError as `checked_casts` does.
    """
    from mxstudy.kernels.device.cast_counts import cast_counts_kernel

    casts = checked_casts(x.shape, fmt if axis == -1 else None, fmt if axis == -2 else None, cast)
    x, columns, known = x.contiguous(), x.shape[-1], constants(casts)
    tile = tile_of(x.numel() // columns, columns, known.block)
    programs = x.numel() // (tile.rows * tile.columns)
    counts = x.new_empty((SUMS + EXTREMES, programs), dtype=torch.float64)
    launch(
        cast_counts_kernel,
        (programs,),
        (x, counts),
        tile.warps,
        AXIS=axis + 2,
        COLUMNS=columns,
        LARGEST=FORMATS[fmt].max,
        TILE=tile,
        CAST=known,
    )
    return CastCounts(counts[:SUMS].sum(1), counts[SUMS:].amax(1), x.numel())


def qualities(counted: Sequence[CastCounts]) -> list[dict[str, float]]:
    """Return the measures of `numerics.quality` for each operand; waits for the GPU once.

    overflow_fraction, max_fraction, underflow_fraction, sqnr_db, and scale_exponent_mean, _min and _max: floor(log2) of
    the scales of blocks that are not all zeros. The exponents are NaN if a block is not finite.
    """
    if not counted:
        return []
    elements = torch.tensor([[one.elements] for one in counted], dtype=torch.float64)
    sums = torch.stack([one.sums for one in counted]).cpu()
    least, most = torch.stack([one.extremes for one in counted]).cpu().unbind(1)
    signal, noise, exponents, blocks = sums[:, 3:].unbind(1)
    overflows, maxima, underflows = (sums[:, :3] / elements).unbind(1)
    measures = {
        "overflow_fraction": overflows,
        "max_fraction": maxima,
        "underflow_fraction": underflows,
        "sqnr_db": 10 * torch.log10(signal / noise),
        "scale_exponent_mean": exponents / blocks,
        "scale_exponent_min": torch.where(exponents.isnan(), torch.nan, -least),
        "scale_exponent_max": torch.where(exponents.isnan(), torch.nan, most),
    }
    return [dict(zip(measures, row, strict=True)) for row in torch.stack(list(measures.values()), 1).tolist()]
