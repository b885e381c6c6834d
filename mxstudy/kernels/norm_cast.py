"""Residual sum, norm, gain and both casts in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from mxstudy.kernels.operators import (
    BF16,
    UNREAD,
    Casts,
    Tile,
    argument_of,
    both,
    check_tile,
    checked_casts,
    constants,
    empty_both,
    launch,
    power_of_two_in,
)
from mxstudy.kernels.packing import pack_fields, unpack
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.norm_linear import affine, center, normalize, rms_coefficient, rms_estimate, rms_exact, row_mean
from mxstudy.reader import ConfigError, require

TILE_ELEMENTS, WARPS = 16384, 16
ROW_TILE_ELEMENTS, ROW_WARPS = 8192, 8


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm; LayerNorm if it `centers`; MXNorm if it has the exponent `p`, over the cast's blocks along the row."""

    p: float | None = None
    centers: bool = False
    eps: float = 1e-5


@dataclass(frozen=True)
class Normed(RowNorm):
    """A RowNorm, and whether its output is rounded to bf16 before it is cast."""

    round_output: bool = False


class NormConstants(NamedTuple):
    """A RowNorm as a kernel is compiled for it. `coefficient`: None for the exact RMS."""

    p: float | None
    coefficient: float | None
    eps: float
    round_output: bool

    @property
    def is_direct(self) -> bool:
        """Return whether powers of maxima may be summed unscaled: that loses nothing unless they over- or underflow."""
        return self.p in (1, 2)


class NormCast(NamedTuple):
    """The results of `norm_cast_both`: both operands in bf16, and `total`, what was normalised, in x's dtype.

    `mean` and `rms`: float32 [..., rows, 1]; the mean is None for a norm that does not center.
    """

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
    """Normalise x + branch and cast it for both contractions.

    x [rows, columns] or, for a stack, [S, rows, columns], bf16 or fp32; `branch`, of x's shape, is added to x first,
    and the sum is rounded to x's dtype. gain and bias: [columns], or [S, 1, columns] with one per replica; None if
    there is none or the gain is folded into the weight. The cast reads FP32, or bf16 with `round_output`. UNREAD in
    place of a format leaves that operand out. Raises ConfigError for a bias without a gain, a norm that centers and has
    p, and as `checked_casts` does.
    """
    require(gain is not None or bias is None, "bias: it is added after the gain; give a gain too")
    require(norm.p is None or not norm.centers, "norm: MXNorm reads maxima of x itself; give p or centers, not both")
    require(branch is None or branch.shape == x.shape, "branch: it is added to x; give it x's shape")
    if norm.p is not None and x.shape[-1] % cast.block_size:
        raise ConfigError(f"block_size: {cast.block_size} does not divide axis -1 of shape {list(x.shape)}")
    known = pack_fields(Normed, norm.p, norm.centers, norm.eps, round_output)
    casts = checked_casts(x.shape, row, column, cast)
    first, second, total, mean, rms = _norm_cast_both(x, branch, gain, bias, known, casts)
    return NormCast(first, second, x if branch is None else total, mean if norm.centers else None, rms)


Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def empty_results(x: Tensor, has_branch: bool, centers: bool, casts: str) -> Tensors:
    """Return uninitialised row and column operand, sum, mean and rms; those that the norm does not have are empty."""
    total = x.new_empty(x.shape if has_branch else 0)
    rms = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return *empty_both(x, casts), total, torch.empty_like(rms) if centers else rms.new_empty(0), rms


@library.custom_op("mxstudy::norm_cast_both", mutates_args=())
def _norm_cast_both(
    x: Tensor, branch: Tensor | None, gain: Tensor | None, bias: Tensor | None, norm: str, casts: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    known, block_size = unpack(Normed, norm), unpack(Casts, casts).block_size
    total = x if branch is None else to_dtype(x + branch, x.dtype).contiguous()
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
def launch_cuda(
    x: Tensor,
    branch: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    norm: str,
    casts: str,
    tile: Tile | None = None,
) -> Tensors:
    """Launch the kernel.

    `tile`: another tile than usual, with whole blocks, whose columns divide those of x; it may change the last bits of
    rms.
    """
    from mxstudy.kernels.device.norm_cast import norm_cast_both_kernel

    x, known, of_casts = x.contiguous(), unpack(Normed, norm), constants(casts)
    results = empty_results(x, branch is not None, known.centers, casts)
    row_operand, column_operand, total, mean, rms = results
    rows, columns = x.shape[-2:]
    replicas, block_size = x.numel() // (rows * columns), of_casts.block
    tile = tile or (row_tile(columns) if unpack(Casts, casts).column == UNREAD else norm_tile(columns, block_size))
    check_tile("columns", tile.columns, columns)
    launch(
        norm_cast_both_kernel,
        (-(-rows // tile.rows), replicas),
        (
            x,
            None if branch is None else branch.contiguous(),
            None if gain is None else gain.contiguous(),
            None if bias is None else bias.contiguous(),
            None if branch is None else total,
            argument_of(row_operand),
            argument_of(column_operand),
            mean if known.centers else None,
            rms,
            rows,
            0 if gain is None or gain.numel() == columns else columns,
        ),
        tile.warps,
        COLUMNS=columns,
        TILE=tile,
        CAST=of_casts,
        **norm_arguments(known, block_size, known.round_output),
    )
    return results


@cache
def norm_arguments(norm: RowNorm, block_size: int, round_output: bool = False) -> dict[str, Any]:
    """Return the arguments by which a kernel is compiled for the norm: its three functions, and its constants."""
    from mxstudy.kernels.device.norm_cast import BLOCK_MAXIMA, CENTERED, EXACT

    of_exact = CENTERED if norm.centers else EXACT
    gather, merge, finish = of_exact if norm.p is None else BLOCK_MAXIMA
    known = norm_constants(norm, block_size, round_output)
    return {"GATHER": gather, "MERGE": merge, "FINISH": finish, "NORM": known}


def norm_constants(norm: RowNorm, block_size: int, round_output: bool = False) -> NormConstants:
    """Return the norm as kernels are compiled for it."""
    coefficient = None if norm.p is None else rms_coefficient(norm.p, block_size)
    return NormConstants(norm.p, coefficient, norm.eps, round_output)


def row_tile(columns: int) -> Tile:
    """Return the tile if the column operand is unread: as many rows as registers hold, whole if they fit."""
    width = min(power_of_two_in(columns), ROW_TILE_ELEMENTS)
    return Tile(ROW_TILE_ELEMENTS // width, width, ROW_WARPS)


def norm_tile(columns: int, block_size: int) -> Tile:
    """Return a tile of one row of blocks and as many columns as registers hold; it depends on the columns only."""
    return Tile(block_size, min(power_of_two_in(columns), TILE_ELEMENTS // block_size), WARPS)
