"""Residual sum, norm, gain and both casts in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, library

from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.kernels.operands import (
    BF16,
    UNREAD,
    Casts,
    Tile,
    both,
    constants,
    empty_both,
    launch,
    power_of_two_in,
    settings,
    written,
)
from mxstudy.numerics.kernels.packing import pack, unpack
from mxstudy.numerics.norm import affine, center, normalize, rms_coefficient, rms_estimate, rms_exact, row_mean
from mxstudy.reader import require

TILE_ELEMENTS, WARPS = 16384, 16
ROW_TILE_ELEMENTS, ROW_WARPS = 8192, 8


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm; LayerNorm where it `centers`; MXNorm with the exponent `p`, over the cast's blocks along the row."""

    p: float | None = None
    centers: bool = False
    eps: float = 1e-5


@dataclass(frozen=True)
class Normed(RowNorm):
    """A RowNorm, and whether its output is rounded to bf16 before it is cast."""

    round_output: bool = False


class NormConstants(NamedTuple):
    """What a kernel must know of a RowNorm; `coefficient`: None for the exact RMS."""

    p: float | None
    coefficient: float | None
    eps: float
    round_output: bool

    @property
    def is_direct(self) -> bool:
        """Powers of maxima are first summed as they are, which loses nothing but where they over- or underflow."""
        return self.p in (1, 2)


class NormCast(NamedTuple):
    """Both operands, bf16; what was normalised, in x's dtype; float32 [..., rows, 1], no mean where none is taken."""

    row: Tensor
    column: Tensor
    total: Tensor
    mean: Tensor | None
    rms: Tensor


def norm_cast_both(
    x: Tensor,
    gain: Tensor | None,
    norm: RowNorm,
    row: str | None,
    column: str | None,
    cast: BlockCast,
    *,
    bias: Tensor | None = None,
    branch: Tensor | None = None,
    round_output: bool = False,
) -> NormCast:
    """x [rows, columns] or, of a stack, [S, rows, columns], bf16 or fp32; `branch`, x's shape, is added to it first.

    gain and bias: [columns], or [S, 1, columns] with one a replica; None where there is none or the weight has taken
    it up. What is cast is FP32, or rounded to bf16 before where `round_output`; UNREAD in place of a format leaves the
    operand out. The sum of x and branch is rounded to x's dtype. Raises ConfigError for a bias without a gain, a norm
    that centers and has p, and as `settings` does.
    """
    require(gain is not None or bias is None, "bias: it is added after the gain; give that too")
    require(
        norm.p is None or not norm.centers, "norm: MXNorm's maxima are those of x; p and centers exclude each other"
    )
    require(branch is None or branch.shape == x.shape, "branch: it is added to x and has x's shape")
    require(
        norm.p is None or x.shape[-1] % cast.block_size == 0,
        f"block_size: {cast.block_size} does not divide axis -1 of shape {list(x.shape)}",
    )
    known = pack(Normed(norm.p, norm.centers, norm.eps, round_output))
    casts = settings(x.shape, row, column, cast)
    first, second, total, mean, rms = _norm_cast_both(x, branch, gain, bias, known, casts)
    return NormCast(first, second, x if branch is None else total, mean if norm.centers else None, rms)


Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def empty_results(x: Tensor, has_branch: bool, centers: bool, casts: str) -> Tensors:
    """Row and column operand, sum, mean, rms; of no elements where there is no such thing."""
    total = torch.empty_like(x) if has_branch else x.new_empty(0)
    rms = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return *empty_both(x, casts), total, torch.empty_like(rms) if centers else rms.new_empty(0), rms


@library.custom_op("mxstudy::norm_cast_both", mutates_args=())
def _norm_cast_both(
    x: Tensor, branch: Tensor | None, gain: Tensor | None, bias: Tensor | None, norm: str, casts: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    known, block_size = unpack(Normed, norm), unpack(Casts, casts).block_size
    total = x if branch is None else to_dtype(x + branch, x.dtype)
    mean = row_mean(total) if known.centers else None
    centered, p = center(total, mean), known.p
    rms = rms_exact(centered, known.eps) if p is None else rms_estimate(centered, p, block_size, known.eps)
    y = normalize(centered, rms)
    y = y if gain is None else affine(y, gain, bias)
    operands = both(to_dtype(y, BF16) if known.round_output else y, casts)
    nothing = x.new_empty(0)
    return *operands, nothing if branch is None else total, rms.new_empty(0) if mean is None else mean, rms


@_norm_cast_both.register_fake
def _(x: Tensor, branch: Tensor | None, gain: Tensor | None, bias: Tensor | None, norm: str, casts: str) -> Tensors:
    return empty_results(x, branch is not None, unpack(Normed, norm).centers, casts)


@_norm_cast_both.register_kernel("cuda")
def run(
    x: Tensor,
    branch: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    norm: str,
    casts: str,
    tile: Tile | None = None,
) -> Tensors:
    """`tile`: another one than usual, with blocks whole in it; then the RMS may differ in its last bits."""
    from mxstudy.numerics.kernels.device import norm as device

    x, known, of_casts = x.contiguous(), unpack(Normed, norm), constants(casts)
    results = empty_results(x, branch is not None, known.centers, casts)
    row_operand, column_operand, total, mean, rms = results
    rows, columns = x.shape[-2:]
    replicas, block_size = x.numel() // (rows * columns), of_casts.block
    tile = tile or (row_tile(columns) if unpack(Casts, casts).column == UNREAD else norm_tile(columns, block_size))
    of_exact = device.CENTERED if known.centers else device.EXACT
    gather, merge, finish = of_exact if known.p is None else device.BLOCK_MAXIMA
    launch(
        device.norm_cast_both_kernel,
        (-(-rows // tile.rows), replicas),
        (
            x,
            None if branch is None else branch.contiguous(),
            None if gain is None else gain.contiguous(),
            None if bias is None else bias.contiguous(),
            None if branch is None else total,
            written(row_operand),
            written(column_operand),
            mean if known.centers else None,
            rms,
            rows,
            0 if gain is None or gain.numel() == columns else columns,
        ),
        tile.warps,
        GATHER=gather,
        MERGE=merge,
        FINISH=finish,
        NORM=norm_constants(known, block_size, known.round_output),
        COLUMNS=columns,
        TILE=tile,
        CAST=of_casts,
    )
    return results


def norm_constants(norm: RowNorm, block_size: int, round_output: bool = False) -> NormConstants:
    """Returns the norm as kernels take it: known when they are compiled."""
    coefficient = None if norm.p is None else rms_coefficient(norm.p, block_size)
    return NormConstants(norm.p, coefficient, norm.eps, round_output)


def row_tile(columns: int) -> Tile:
    """Where the column operand is unread: rows whole if that may be, and as many as registers take."""
    width = min(power_of_two_in(columns), ROW_TILE_ELEMENTS)
    return Tile(ROW_TILE_ELEMENTS // width, width, ROW_WARPS)


def norm_tile(columns: int, block_size: int) -> Tile:
    """A row of blocks and as many columns as registers take: a function of the columns, whatever the rows."""
    return Tile(block_size, min(power_of_two_in(columns), TILE_ELEMENTS // block_size), WARPS)
