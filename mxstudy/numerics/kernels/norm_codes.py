"""Norm and cast in one pass: the codes and scales that hardware with MX GEMMs reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from mxstudy.numerics.cast import BlockCast, Quantized, block_cast, check_nvfp4, check_tensor_scale
from mxstudy.numerics.formats import FORMATS, look_up
from mxstudy.numerics.kernels.norm import RowNorm, norm_constants
from mxstudy.numerics.kernels.operands import (
    BF16,
    FormatConstants,
    check_settings,
    format_constants,
    is_capable_of,
    launch,
)
from mxstudy.numerics.kernels.packing import pack, unpack
from mxstudy.numerics.norm import normalize, rms_estimate, rms_exact
from mxstudy.reader import require

CODED = ("E4M3", "E5M2", "E2M1", "NVFP4")  # formats of whole or half bytes
MAX_COLUMNS = 2**16  # a program has rows whole in its registers
CHUNKS = 8  # at most, of a row
SPAN = 16  # elements of a chunk that a thread has side by side
WARP = 32 * SPAN


@dataclass(frozen=True)
class Encoding:
    """How rows become codes: by a RowNorm without a mean, a format and a BlockCast."""

    p: float | None
    eps: float
    fmt: str
    block_size: int
    scale_rule: str
    rounding: str
    pre_round: bool

    @property
    def norm(self) -> RowNorm:
        return RowNorm(p=self.p, eps=self.eps)

    @property
    def block_cast(self) -> BlockCast:
        return BlockCast(self.block_size, self.scale_rule, self.rounding, self.pre_round)


class NormCodes(NamedTuple):
    """As those of `Quantized`: codes uint8, scales uint8 or, of NVFP4, float8_e4m3fn; and the rms, float32 [..., 1].

    `total`: what was normalised, in bf16.
    """

    codes: Tensor
    scales: Tensor
    rms: Tensor
    total: Tensor

    def quantized(self, fmt: str, block_size: int, tensor_scale: float | None = None) -> Quantized:
        """The tensor that they are of, `tensor_scale` being what was given for it."""
        scale = None if tensor_scale is None else torch.tensor(tensor_scale, device=self.codes.device)
        return Quantized.from_codes(self.codes, self.scales, fmt, -1, block_size, scale)


class RowTile(NamedTuple):
    """Rows of one program, the width of the chunks in which it has them, and its warps."""

    rows: int
    chunk: int
    warps: int


FASTER_TILES = {1280: RowTile(2, 256, 1), 8192: RowTile(1, 2048, 4)}  # by columns, as `benchmarks.kernel_tiles` finds


def norm_codes(
    x: Tensor,
    norm: RowNorm,
    fmt: str,
    cast: BlockCast,
    tensor_scale: float | None = None,
    branch: Tensor | None = None,
) -> NormCodes:
    """x [..., columns] bf16 over its RMS, or over MXNorm's estimate of it, quantised along the columns.

    `branch`, as x is, is added to it first, and the sum rounded to bf16.
    Given the rms that is returned, bit by bit what `block_cast(x / rms, fmt, -1, cast, tensor_scale)` gives.
    `tensor_scale`: NVFP4's, of all rows; that of what no |x / rms| exceeds (MXNorm paper, Lemmas 1 and 2) needs no pass
    over x. Raises ConfigError for another x than bf16, and for norms, formats, casts and shapes that have no kernel.
    """
    element = look_up(FORMATS, fmt, "format")
    check_settings(cast)
    columns = x.shape[-1]
    require(x.dtype == BF16, f"x: {x.dtype} has no kernel; give bfloat16")
    require(
        branch is None or (branch.dtype, branch.shape) == (BF16, x.shape),
        "branch: it is added to x; give its shape and dtype",
    )
    require(not norm.centers, "norm: the mean has no kernel that gives codes; take centers=False")
    require(fmt in CODED, f"format: {fmt} has no kernel that gives codes; take one of {', '.join(CODED)}")
    require(columns % cast.block_size == 0, f"block_size: {cast.block_size} does not divide axis -1 of {list(x.shape)}")
    require(columns <= MAX_COLUMNS, f"x: rows of {columns} have no kernel; {MAX_COLUMNS} at most")
    is_nvfp4 = element.scale == "E4M3"
    if is_nvfp4:
        check_nvfp4(fmt, cast)
    require(
        is_nvfp4 == (tensor_scale is not None),
        f"tensor_scale: {fmt} {'needs that of a bound of x / rms' if is_nvfp4 else 'has none; NVFP4 has'}",
    )
    check_tensor_scale(tensor_scale)
    codes, scales, rms, total = _norm_codes(x, branch, tensor_scale, encoding(norm, fmt, cast))
    scales = scales.view(torch.float8_e4m3fn) if is_nvfp4 else scales
    return NormCodes(codes, scales, rms, x if branch is None else total)


def encoding(norm: RowNorm, fmt: str, cast: BlockCast) -> str:
    """Returns the `Encoding`, packed."""
    options = (cast.block_size, cast.scale_rule, cast.rounding, cast.operand_pre_round)
    return pack(Encoding(norm.p, norm.eps, fmt, *options))


Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


@library.custom_op("mxstudy::norm_codes", mutates_args=())
def _norm_codes(
    x: Tensor, branch: Tensor | None, tensor_scale: float | None, packed: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    e = unpack(Encoding, packed)
    total = x if branch is None else x + branch
    rms = rms_exact(total, e.eps) if e.p is None else rms_estimate(total, e.p, e.block_size, e.eps)
    quantized = block_cast(normalize(total, rms), e.fmt, -1, e.block_cast, tensor_scale)
    return quantized.codes, quantized.scales.view(torch.uint8), rms, x.new_empty(0) if branch is None else total


@_norm_codes.register_fake
def _(x: Tensor, branch: Tensor | None, tensor_scale: float | None, packed: str) -> Tensors:
    return empty_results(x, branch is not None, unpack(Encoding, packed))


def empty_results(x: Tensor, has_branch: bool, encoding: Encoding) -> Tensors:
    """Codes, scales, rms, and the sum with the branch, of no elements where there is none."""
    *leading, columns = x.shape
    codes = x.new_empty((*leading, columns * FORMATS[encoding.fmt].bits // 8), dtype=torch.uint8)
    scales = x.new_empty((*leading, columns // encoding.block_size), dtype=torch.uint8)
    rms = x.new_empty((*leading, 1), dtype=torch.float32)
    return codes, scales, rms, torch.empty_like(x) if has_branch else x.new_empty(0)


@_norm_codes.register_kernel("cuda")
def run(
    x: Tensor, branch: Tensor | None, tensor_scale: float | None, packed: str, tile: RowTile | None = None
) -> Tensors:
    """`tile`: another one than `row_tile`; then the RMS may differ in its last bits."""
    from mxstudy.numerics.kernels.device.norm_codes import norm_codes_kernel

    e = unpack(Encoding, packed)
    codes, scales, rms, total = results = empty_results(x, branch is not None, e)
    added = (None, None) if branch is None else (in_words(branch), in_words(total))
    columns = x.shape[-1]
    rows, tile = x.numel() // columns, tile or row_tile(columns, e.block_size)
    launch(
        norm_codes_kernel,
        (-(-rows // tile.rows),),
        (in_words(x), *added, codes, scales, rms, rows, 1.0 if tensor_scale is None else tensor_scale),
        tile.warps,
        **known(tile, columns, rows, e.norm, e.fmt, e.block_cast),
    )
    return results


def known(tile: RowTile, columns: int, rows: int, norm: RowNorm, fmt: str, cast: BlockCast) -> dict[str, Any]:
    """What the kernel is compiled for."""
    from mxstudy.numerics.kernels.device.codes import ELEMENTS

    pairs, block_size = is_capable_of(9, 0), cast.block_size
    return {
        "NORM": norm_constants(norm, block_size),
        "SHAPE": Shape(tile.rows, tile.chunk, block_size, columns, rows % tile.rows == 0, pairs),
        "CAST": Cast(
            element=ELEMENTS[fmt],
            format=format_constants(fmt, cast.scale_rule),
            e4m3_scales=FORMATS[fmt].scale == "E4M3",
            away=cast.rounding == "away",
            pre_round=cast.operand_pre_round,
            counted=pairs and fmt == "E2M1",
        ),
    }


class Shape(NamedTuple):
    """What one program of a kernel has; `block` and `columns` in numbers, `chunk` too."""

    rows: int
    chunk: int
    block: int
    columns: int
    whole_tiles: bool  # the tile's rows divide all rows
    pairs: bool  # there are instructions for pairs of 16-bit integers
    words: int = 4  # of a vector, two numbers each; a span is two vectors

    @property
    def spans(self) -> int:
        """Of a chunk."""
        return self.chunk // SPAN

    @property
    def blocks(self) -> int:
        """Of a chunk."""
        return self.chunk // self.block

    @property
    def chunks(self) -> int:
        return -(-self.columns // self.chunk)


class Cast(NamedTuple):
    """What becomes of x / rms; `element`: Triton's type of an element, None for E2M1, of which two are a byte."""

    element: Any
    format: FormatConstants | None
    e4m3_scales: bool  # relative to a scale of the tensor
    away: bool
    pre_round: bool
    counted: bool  # E2M1 without dividing each number

    @property
    def numbers_a_byte(self) -> int:
        return 2 if self.element is None else 1


def in_words(x: Tensor) -> Tensor:
    """Two bf16 numbers each; a copy where a word would begin amid another."""
    x = x.contiguous()
    return (x if x.storage_offset() % 2 == 0 else x.clone()).view(torch.int32)


def row_tile(columns: int, block_size: int) -> RowTile:
    """One row, where it has work for a warp; a thread has a span of every chunk, so 128 elements at most."""
    if columns in FASTER_TILES:
        return FASTER_TILES[columns]
    padded = 1 << (columns - 1).bit_length()
    chunk = max(padded // CHUNKS, min(padded, WARP), block_size)
    return RowTile(max(1, WARP // chunk), chunk, max(1, chunk // WARP))
