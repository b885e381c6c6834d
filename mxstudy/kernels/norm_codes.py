"""Norm and cast in one pass, to the codes and scales that hardware with MX GEMMs reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from mxstudy.kernels.norm_cast import RowNorm, norm_constants
from mxstudy.kernels.operators import (
    BF16,
    FormatConstants,
    check_settings,
    format_constants,
    is_capable_of,
    launch,
)
from mxstudy.kernels.packing import pack_fields, unpack
from mxstudy.numerics.cast import BlockCast, block_cast, check_nvfp4, check_tensor_scale
from mxstudy.numerics.formats import FORMATS, look_up
from mxstudy.numerics.norm_linear import normalize, rms_estimate, rms_exact
from mxstudy.numerics.quantized import Quantized
from mxstudy.reader import require

CODED = ("E4M3", "E5M2", "E2M1", "NVFP4")  # formats whose codes are whole or half bytes
MAX_COLUMNS = 2**16  # a program holds whole rows in its registers
CHUNKS = 8  # the most chunks of a row
SPAN = 16  # adjacent elements of a chunk that one thread holds
WARP = 32 * SPAN


@dataclass(frozen=True)
class Encoding:
    """How rows become codes: the fields of a RowNorm without a mean, a format and a BlockCast."""

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
    """The results of `norm_codes`: codes and scales as in `Quantized`, the rms, and the `total` that was normalised.

    `codes`: uint8. `scales`: uint8, or float8_e4m3fn for NVFP4. `rms`: float32 [..., 1]. `total`: bf16.
    """

    codes: Tensor
    scales: Tensor
    rms: Tensor
    total: Tensor

    def quantized(self, fmt: str, block_size: int, tensor_scale: float | None = None) -> Quantized:
        """Return the quantised tensor. `tensor_scale`: the one that was given to `norm_codes`."""
        scale = None if tensor_scale is None else torch.tensor(tensor_scale, device=self.codes.device)
        return Quantized.from_codes(self.codes, self.scales, fmt, -1, block_size, scale)


class RowTile(NamedTuple):
    """The rows of one program, the width of the chunks in which it holds them, and its warps."""

    rows: int
    chunk: int
    warps: int


FASTER_TILES = {1280: RowTile(2, 256, 1), 8192: RowTile(1, 2048, 4)}  # by columns: found by `benchmarks.kernel_tiles`


def norm_codes(
    x: Tensor,
    norm: RowNorm,
    fmt: str,
    cast: BlockCast,
    tensor_scale: float | None = None,
    branch: Tensor | None = None,
) -> NormCodes:
    """Quantise x / rms along the columns: x [..., columns] bf16, rms its RMS or MXNorm's estimate of it.

    `branch`, like x, is added to x first, and the sum is rounded to bf16. With the returned rms the result has the bits
    of `block_cast(x / rms, fmt, -1, cast, tensor_scale)`. `tensor_scale`: NVFP4's, for all rows; the one of an upper
    bound of |x / rms| (MXNorm paper, Lemmas 1 and 2) needs no pass over x. Raises ConfigError for x that is not bf16,
    and for norms, formats, casts and shapes that have no kernel.
    """
    element = look_up(FORMATS, fmt, "format")
    check_settings(cast)
    columns = x.shape[-1]
    require(x.dtype == BF16, f"x: the kernel takes bfloat16, not {x.dtype}")
    require(
        branch is None or (branch.dtype, branch.shape) == (BF16, x.shape),
        "branch: it is added to x; give its shape and dtype",
    )
    require(not norm.centers, "norm: no kernel that gives codes subtracts a mean; take centers=False")
    require(fmt in CODED, f"format: {fmt} has no kernel that gives codes; take one of {', '.join(CODED)}")
    require(columns % cast.block_size == 0, f"block_size: {cast.block_size} does not divide axis -1 of {list(x.shape)}")
    require(columns <= MAX_COLUMNS, f"x: rows of {columns} have no kernel; give {MAX_COLUMNS} columns at most")
    is_nvfp4 = element.scale == "E4M3"
    if is_nvfp4:
        check_nvfp4(cast)
    require(
        is_nvfp4 == (tensor_scale is not None),
        f"tensor_scale: {fmt} {'needs one: give that of a bound of x / rms' if is_nvfp4 else 'has none; leave it out'}",
    )
    if tensor_scale is not None:
        check_tensor_scale(tensor_scale)
    codes, scales, rms, total = _norm_codes(x, branch, tensor_scale, encoding(norm, fmt, cast))
    scales = scales.view(torch.float8_e4m3fn) if is_nvfp4 else scales
    return NormCodes(codes, scales, rms, x if branch is None else total)


def encoding(norm: RowNorm, fmt: str, cast: BlockCast) -> str:
    """Return the packed `Encoding`."""
    options = (cast.block_size, cast.scale_rule, cast.rounding, cast.operand_pre_round)
    return pack_fields(Encoding, norm.p, norm.eps, fmt, *options)


Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


@library.custom_op("mxstudy::norm_codes", mutates_args=())
def _norm_codes(
    x: Tensor, branch: Tensor | None, tensor_scale: float | None, packed: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    e = unpack(Encoding, packed)
    total = (x if branch is None else x + branch).contiguous()
    rms = rms_exact(total, e.eps) if e.p is None else rms_estimate(total, e.p, e.block_size, e.eps)
    quantized = block_cast(normalize(total, rms), e.fmt, -1, e.block_cast, tensor_scale)
    return quantized.codes, quantized.scales.view(torch.uint8), rms, x.new_empty(0) if branch is None else total


@_norm_codes.register_fake
def _(x: Tensor, branch: Tensor | None, tensor_scale: float | None, packed: str) -> Tensors:
    return empty_results(x, branch is not None, unpack(Encoding, packed))


def empty_results(x: Tensor, has_branch: bool, encoding: Encoding) -> Tensors:
    """Return uninitialised codes, scales, rms, and the sum with the branch, which is empty if there is no branch."""
    *leading, columns = x.shape
    codes = x.new_empty((*leading, columns * FORMATS[encoding.fmt].bits // 8), dtype=torch.uint8)
    scales = x.new_empty((*leading, columns // encoding.block_size), dtype=torch.uint8)
    rms = x.new_empty((*leading, 1), dtype=torch.float32)
    return codes, scales, rms, x.new_empty(x.shape if has_branch else 0)


@_norm_codes.register_kernel("cuda")
def launch_cuda(
    x: Tensor, branch: Tensor | None, tensor_scale: float | None, packed: str, tile: RowTile | None = None
) -> Tensors:
    """Launch the kernel. `tile`: a tile other than `row_tile`'s; then the RMS may differ in its last bits."""
    from mxstudy.kernels.device.norm_codes import norm_codes_kernel

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
    """Return the compile-time arguments of the kernel."""
    from mxstudy.kernels.device.codes import ELEMENTS

    pairs, block_size = is_capable_of(9, 0), cast.block_size
    return {
        "NORM": norm_constants(norm, block_size),
        "SHAPE": Shape(tile.rows, tile.chunk, block_size, columns, rows % tile.rows == 0, pairs),
        "CAST": EncodingConstants(
            element=ELEMENTS[fmt],
            format=format_constants(fmt, cast.scale_rule),
            e4m3_scales=FORMATS[fmt].scale == "E4M3",
            away=cast.rounding == "away",
            pre_round=cast.operand_pre_round,
            counted=pairs and fmt == "E2M1",
        ),
    }


class Shape(NamedTuple):
    """The tile of one program; `block`, `columns` and `chunk` are counted in elements."""

    rows: int
    chunk: int
    block: int
    columns: int
    whole_tiles: bool  # the tile's rows divide all rows
    pairs: bool  # there are instructions for pairs of 16-bit integers
    words: int = 4  # words per vector, two numbers each; a span is two vectors

    @property
    def spans(self) -> int:
        """Return the spans per chunk."""
        return self.chunk // SPAN

    @property
    def blocks(self) -> int:
        """Return the blocks per chunk."""
        return self.chunk // self.block

    @property
    def chunks(self) -> int:
        return -(-self.columns // self.chunk)


class EncodingConstants(NamedTuple):
    """How x / rms is encoded. `element`: Triton's type of an element; None for E2M1, with two codes per byte."""

    element: Any
    format: FormatConstants | None
    e4m3_scales: bool  # block scales are E4M3, relative to a tensor scale
    away: bool
    pre_round: bool
    counted: bool  # E2M1 codes are counted, without dividing each number

    @property
    def numbers_a_byte(self) -> int:
        return 2 if self.element is None else 1


def in_words(x: Tensor) -> Tensor:
    """Return x (bf16) as int32 words of two numbers each; a copy if a word would start in the middle of another."""
    x = x.contiguous()
    return (x if x.storage_offset() % 2 == 0 else x.clone()).view(torch.int32)


def row_tile(columns: int, block_size: int) -> RowTile:
    """Return a tile of one row, or more if a row is too short for a warp; a thread has at most 128 elements."""
    if columns in FASTER_TILES:
        return FASTER_TILES[columns]
    padded = 1 << (columns - 1).bit_length()
    chunk = max(padded // CHUNKS, min(padded, WARP), block_size)
    return RowTile(max(1, WARP // chunk), chunk, max(1, chunk // WARP))
