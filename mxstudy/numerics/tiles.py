"""Blocks of a tensor: one axis split into [blocks, block size], or the last two axes split into square blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mxstudy.reader import ConfigError


@dataclass(frozen=True)
class Tiles:
    """The blocks of a tensor of this shape: `axis` is split into blocks, or both of the last two axes are."""

    shape: torch.Size
    axis: int
    block_size: int
    two_dimensional: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """Return the axes that are split, the last first."""
        ndim = len(self.shape)
        return (ndim - 1, ndim - 2) if self.two_dimensional else (self.axis,)

    @property
    def inner(self) -> tuple[int, ...]:
        """Return the axes inside a block of a split tensor, in the order in which sums over square blocks take them."""
        ndim = len(self.shape)
        return (ndim - 1, ndim + 1) if self.two_dimensional else (self.axis + 1,)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Return the shape of a tensor with one number per block."""
        return tuple(-(-n // self.block_size) if i in self.axes else n for i, n in enumerate(self.shape))

    def split(self, x: Tensor, pad: bool = False) -> Tensor:
        """Return x with each of `axes` split into [blocks, block size], as `split_blocks` does."""
        for axis in self.axes:
            x = split_blocks(x, self.block_size, axis, pad)
        return x

    def join(self, blocks: Tensor) -> Tensor:
        """Undo `split`."""
        for axis in reversed(self.axes):
            blocks = join_blocks(blocks, axis, self.shape[axis])
        return blocks

    def spread(self, scales: Tensor) -> Tensor:
        """Return one number per block with axes of 1 inside the blocks, so that it broadcasts over a split tensor."""
        for axis in self.inner:
            scales = scales.unsqueeze(axis)
        return scales

    def squeeze(self, spread: Tensor) -> Tensor:
        """Undo `spread`."""
        for axis in reversed(self.inner):
            spread = spread.squeeze(axis)
        return spread


def split_blocks(x: Tensor, block_size: int, axis: int, pad: bool = False) -> Tensor:
    """Return x with `axis` (not negative) split into [blocks, block_size].

    If the block size does not divide it: `pad` fills the last block with zeros, else ConfigError is raised.
    """
    if block_size < 1 or (x.shape[axis] % block_size and not pad):
        raise ConfigError(f"block_size: {block_size} does not divide axis {axis} of shape {list(x.shape)}")
    missing = -x.shape[axis] % block_size
    if missing:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, missing])
    return x.unflatten(axis, (-1, block_size))


def join_blocks(blocks: Tensor, axis: int, size: int) -> Tensor:
    """Undo `split_blocks`: join [.., blocks, block_size, ..] into an `axis` of `size`, without padding."""
    merged = blocks.flatten(axis, axis + 1)
    return merged if merged.shape[axis] == size else merged.narrow(axis, 0, size)
