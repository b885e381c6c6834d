"""Cast a tensor for one contraction, after rounding it as a weight or normalising it as a norm's input."""

from __future__ import annotations

from torch import Tensor, library

from mxstudy.kernels.operators import BF16, FP32, Casts, Tile, checked_casts, constants, launch, operand, tile_of
from mxstudy.kernels.packing import unpack
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.norm_linear import affine, center, normalize
from mxstudy.numerics.transforms import check_axis
from mxstudy.reader import require


def cast_one(
    x: Tensor,
    fmt: str | None,
    axis: int,
    cast: BlockCast,
    *,
    mean: Tensor | None = None,
    rms: Tensor | None = None,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    round_first: bool = False,
    after: Tensor | None = None,
) -> Tensor:
    """Return (x - mean) / rms * gain + bias quantised along `axis`, -2 or -1: bf16, x's shape. Any step may be missing.

    x [rows, columns] bf16 or fp32, mean and rms float32 [rows, 1], gain and bias [columns]. `round_first`: round x to
    bf16 before anything else. `after` is not read: an argument that depends on a gradient keeps the cast in the
    backward, where a compiler would otherwise move it to the forward and keep the result. A bf16 x without a format is
    returned as it is. Raises ConfigError for a bias without a gain, another axis, and as `checked_casts` does.
    """
    check_axis(axis)
    require(gain is not None or bias is None, "bias: it is added after the gain; give a gain too")
    if fmt is None and x.dtype == BF16 and rms is None and mean is None and gain is None:
        return x
    casts = checked_casts(x.shape, fmt if axis == -1 else None, fmt if axis == -2 else None, cast)
    return _cast_one(x, mean, rms, gain, bias, after, round_first, axis, casts)


@library.custom_op("mxstudy::cast_one", mutates_args=())
def _cast_one(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    after: Tensor | None,
    round_first: bool,
    axis: int,
    casts: str,
) -> Tensor:
    c = unpack(Casts, casts)
    return operand(normed(x, mean, rms, gain, bias, round_first), c.row or c.column, axis, c.block_cast)


def normed(
    x: Tensor, mean: Tensor | None, rms: Tensor | None, gain: Tensor | None, bias: Tensor | None, round_first: bool
) -> Tensor:
    """Return (x - mean) / rms * gain + bias, float32; None leaves a step out. `round_first`: round x to bf16 first."""
    y = center(to_dtype(x, BF16) if round_first else x, mean)
    y = to_dtype(y if rms is None else normalize(y, rms), FP32)
    return y if gain is None else affine(y, gain, bias)


@_cast_one.register_fake
def _(x: Tensor, *options: object) -> Tensor:
    return x.new_empty(x.shape, dtype=BF16)


@_cast_one.register_kernel("cuda")
def launch_cuda(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    after: Tensor | None,
    round_first: bool,
    axis: int,
    casts: str,
    tile: Tile | None = None,
) -> Tensor:
    """Launch the kernel. `tile`: a tile other than the usual one, with whole blocks.

    The result does not depend on the tile.
    """
    from mxstudy.kernels.device.cast_both import cast_one_kernel

    x, columns = x.contiguous(), x.shape[-1]
    result = x.new_empty(x.shape, dtype=BF16)
    known = constants(casts)
    tile = tile or tile_of(x.numel() // columns, columns, known.block)
    launch(
        cast_one_kernel,
        (x.numel() // (tile.rows * tile.columns),),
        (x, *(None if t is None else t.contiguous() for t in (mean, rms, gain, bias)), result),
        tile.warps,
        ROUND_FIRST=round_first,
        AXIS=axis + 2,
        COLUMNS=columns,
        TILE=tile,
        CAST=known,
    )
    return result
