"""The row-wise and column-wise layouts of a quantised matrix (Transformer Engine documentation, MXFP8).

    rowwise      1x32 blocks: scales [rows, columns / 32]     for GEMMs that contract over the columns
    columnwise   32x1 blocks: scales [rows / 32, columns]     for GEMMs that contract over the rows

Neither can be computed from the other, so both are cast from high precision. Scales are stored and communicated in the
matrix's order; right before a GEMM `swizzle_scales` puts them in the order in which the GEMM's tiles read them.

That documentation takes a scale's exponent from amax / 448 in FP32, rounded up where the mantissa is not zero: the
rule "rceil", which this package decides from the bits of amax. Over all finite amax, the division gives another code
only for subnormal quotients: 1 instead of 0 where the quotient is at most 2^-127 (Transformer Engine's kernels give 0
there too), and 0 instead of 1 for one amax, the next above 448 * 2^-127, whose quotient FP32 cannot represent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from mxstudy.numerics.cast import block_size_of, quantize
from mxstudy.numerics.quantized import Quantized
from mxstudy.reader import ConfigError, require

SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)  # one byte each


def rowwise(
    x: Tensor,
    fmt: str = "E4M3",
    block_size: int | None = None,
    scale_rule: str = "rceil",
    rounding: str = "even",
) -> Quantized:
    """Quantise x [..., columns] (bf16, fp16 or fp32) as a matrix [product of the others, columns] in blocks of a row.

    Options as in `quantize`. Raises ConfigError for what `quantize` refuses, for fewer than 2 dimensions, and where the
    last dimension or the product of all others is not divisible by the block size, as in Transformer Engine.
    """
    return quantize(_as_matrix(x, fmt, block_size), fmt, block_size, 1, scale_rule, rounding)


def columnwise(
    x: Tensor,
    fmt: str = "E4M3",
    block_size: int | None = None,
    scale_rule: str = "rceil",
    rounding: str = "even",
) -> Quantized:
    """Quantise as `rowwise` does, in blocks of a column."""
    return quantize(_as_matrix(x, fmt, block_size), fmt, block_size, 0, scale_rule, rounding)


def _as_matrix(x: Tensor, fmt: str, block_size: int | None) -> Tensor:
    """Return x as [product of all dimensions but the last, last]."""
    if isinstance(x, Quantized):
        raise ConfigError("x: is quantised already; give it in high precision, from which each layout is cast")
    shape, block_size = list(x.shape), block_size_of(fmt, block_size)
    require(x.ndim >= 2, f"x: shape {shape} has {x.ndim} dimension(s); needs at least 2")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    require(columns % block_size == 0, f"x: the last dimension of shape {shape} is not divisible by {block_size}")
    require(
        rows % block_size == 0,
        f"x: the product of all dimensions but the last of shape {shape}, {rows}, is not divisible by {block_size}",
    )
    return x.reshape(rows, columns)


# ----------------------------------------------- A tile is 128 rows of 4 scales, read as 4 stripes of 32 rows


def swizzle_scales(scales: Tensor) -> Tensor:
    """Return scales [rows, blocks] of one byte each in the order in which a GEMM reads them: 1-D, same dtype.

    They are zero-padded to 128x4 tiles, ordered along the blocks first, then along the rows; the rows of a tile are in
    the order 0, 32, 64, 96, 1, 33, ..., 127. Give column-wise scales [rows / 32, columns] transposed:
    `swizzle_scales(columnwise(x).scales.T)`. Raises ConfigError for another dtype or not 2 dimensions.
    """
    _check_scales(scales, dimensions=2)
    rows, blocks = scales.shape
    row_tiles, block_tiles = _tiles(rows, blocks)
    padded = pad(scales.view(torch.uint8), (0, block_tiles * 4 - blocks, 0, row_tiles * 128 - rows))
    return padded.reshape(row_tiles, 4, 32, block_tiles, 4).transpose(1, 3).flatten().view(scales.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """Undo `swizzle_scales` and drop its padding: return [rows, blocks], same dtype.

    Raises ConfigError for another dtype, not 1 dimension, or a size other than that of the tiles of [rows, blocks].
    """
    _check_scales(swizzled, dimensions=1)
    row_tiles, block_tiles = _tiles(rows, blocks)
    size = row_tiles * 128 * block_tiles * 4
    require(len(swizzled) == size, f"scales: {len(swizzled)} given; the tiles of [{rows}, {blocks}] have {size}")
    tiles = swizzled.view(torch.uint8).reshape(row_tiles, block_tiles, 32, 4, 4)
    padded = tiles.transpose(1, 3).reshape(row_tiles * 128, block_tiles * 4)
    return padded[:rows, :blocks].contiguous().view(swizzled.dtype)


def _tiles(rows: int, blocks: int) -> tuple[int, int]:
    """Return the number of tiles along the rows and along the blocks."""
    return -(-rows // 128), -(-blocks // 4)


def _check_scales(scales: Tensor, dimensions: int) -> None:
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SCALE_DTYPES)
    require(scales.dtype in SCALE_DTYPES, f"scales: {scales.dtype} is not one of {names}")
    require(scales.ndim == dimensions, f"scales: shape {list(scales.shape)} needs {dimensions} dimension(s)")
