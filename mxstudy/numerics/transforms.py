"""The Hadamard transform of a GEMM's operand, in tiles along its contraction axis.

H is Sylvester's matrix over the root of its size, orthonormal and symmetric, s a vector of signs:

    y = (x * s) H          or, with signs after it,      y = (x H) * s

Both operands of a GEMM take the same transform, so that it cancels in their product: (a s H)(b s H)^T = a b^T. Signs
after H only change the signs of elements. A symmetric cast keeps those, so such signs are a control.

The transform is a butterfly in FP32, with sums in the order of growing strides, then one product with size^-1/2 and
one rounding to bf16, ties to even: the same bits on every device, eager or compiled.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mxstudy.numerics.grid import round_to_bf16, to_dtype
from mxstudy.reader import ConfigError

TRANSFORM_SIZES = (16, 32, 64, 128, 256)


def hadamard(
    x: Tensor,
    size: int,
    signs: Tensor | None = None,
    *,
    axis: int = -1,
    signs_after: bool = False,
    inverse: bool = False,
    rounds: bool = True,
) -> Tensor:
    """Return x in the transform's coordinates: float32 with bf16 values, x's shape.

    x [..., rows, columns] bf16 or fp32; `axis` -1 or -2; `signs` +1 or -1, [size], or [S, 1, size] for a stack of S
    replicas. `inverse`: apply the transpose instead, (x H) * s, or (x * s) H with `signs_after`; it rounds as well, so
    transforming there and back rounds twice. `rounds`: round to bf16; if false, the result is unrounded float32, for a
    statistic. A NaN or an infinity affects only its own tile.
    Raises ConfigError for a size that is not in TRANSFORM_SIZES or does not divide the axis, and for wrong signs.
    """
    check_transform(size, x.shape, axis)
    if signs is not None and signs.shape[-1] != size:
        raise ConfigError(f"transform.signs: {signs.shape[-1]} of them; give {size}, one per element of a tile")
    y = to_dtype(x, torch.float32)
    tiles = (y.mT if axis == -2 else y).unflatten(-1, (-1, size))
    before, after = (signs, None) if signs_after == inverse else (None, signs)
    tiles = butterfly(signed(tiles, before)) * inverse_root(size)
    y = signed(round_to_bf16(tiles) if rounds else tiles, after).flatten(-2)
    return y.mT if axis == -2 else y


def check_axis(axis: int) -> None:
    """Raise ConfigError for an axis that is not one of an operand's two, -2 or -1."""
    if axis not in (-2, -1):
        raise ConfigError(f"axis: {axis} is not an operand's axis; take -1, along the rows, or -2")


def check_transform(size: int, shape: torch.Size | tuple[int, ...], axis: int) -> None:
    """Raise ConfigError for a size not in TRANSFORM_SIZES, an axis other than -2 or -1, or one it does not divide."""
    check_axis(axis)
    if size not in TRANSFORM_SIZES:
        raise ConfigError(f"transform.size: {size} is not a choice; take one of {TRANSFORM_SIZES}")
    if shape[axis] % size:
        dividing = [choice for choice in TRANSFORM_SIZES if shape[axis] % choice == 0]
        advice = f"take one of {dividing}" if dividing else f"none of {TRANSFORM_SIZES} does; change the shape"
        raise ConfigError(f"transform.size: {size} does not divide axis {axis} of shape {list(shape)}; {advice}")


def inverse_root(size: int) -> float:
    """Return the float32 number nearest to size^-1/2."""
    return float(np.float32(size**-0.5))


def signed(tiles: Tensor, signs: Tensor | None) -> Tensor:
    """Return tiles [..., tiles, size] times the signs of their elements, [size] or, for a stack, [S, 1, size]."""
    return tiles if signs is None else tiles * signs.unsqueeze(-2)


def butterfly(tiles: Tensor) -> Tensor:
    """Return float32 [..., size] times the matrix of +1 and -1: (a, b) -> (a + b, a - b) at strides 1, 2, 4, ..."""
    size, stride = tiles.shape[-1], 1
    while stride < size:
        a, b = tiles.unflatten(-1, (-1, 2, stride)).unbind(-2)
        tiles = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return tiles
