"""Blocks of a tensor: an axis cut into [blocks, block size], or its last two axes into square ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mxstudy.reader import ConfigError


@dataclass(frozen=True)
class Tiles:
    """The blocks of a tensor of this shape: `axis` cut into blocks, or the last two axes both."""

    shape: torch.Size
    axis: int
    block_size: int
    two_dimensional: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that are cut, the last first."""
        ndim = len(self.shape)
        return (ndim - 1, ndim - 2) if self.two_dimensional else (self.axis,)

    @property
    def inner(self) -> tuple[int, ...]:
        """The axes inside of a block, of a tensor that is split; sums go over those of square ones in this order."""
        ndim = len(self.shape)
        return (ndim - 1, ndim + 1) if self.two_dimensional else (self.axis + 1,)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of what has one number a block."""
        return tuple(-(-n // self.block_size) if i in self.axes else n for i, n in enumerate(self.shape))

    def split(self, x: Tensor, pad: bool = False) -> Tensor:
        for axis in self.axes:
            x = split_blocks(x, self.block_size, axis, pad)
        return x

    def join(self, blocks: Tensor) -> Tensor:
        """Undo `split`."""
        for axis in reversed(self.axes):
            blocks = join_blocks(blocks, axis, self.shape[axis])
        return blocks

    def spread(self, scales: Tensor) -> Tensor:
        """Give a number a block the axes inside of blocks, so that it broadcasts over what is split."""
        for axis in self.inner:
            scales = scales.unsqueeze(axis)
        return scales

    def squeeze(self, spread: Tensor) -> Tensor:
        """Undo `spread`."""
        for axis in reversed(self.inner):
            spread = spread.squeeze(axis)
        return spread


def split_blocks(x: Tensor, block_size: int, axis: int, pad: bool = False) -> Tensor:
    """x with `axis` (not negative) split into [blocks, block_size].

    Where it does not divide: the last block filled up with zeros, or without `pad` ConfigError.
    """
    if block_size < 1 or (x.shape[axis] % block_size and not pad):
        raise ConfigError(f"block_size: {block_size} does not divide axis {axis} of shape {list(x.shape)}")
    missing = -x.shape[axis] % block_size
    if missing:
        x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, missing])
    return x.unflatten(axis, (-1, block_size))


def join_blocks(blocks: Tensor, axis: int, size: int) -> Tensor:
    """The inverse: [.., blocks, block_size, ..] with `axis` as long as it was, without zeros that filled it up."""
    joined = blocks.flatten(axis, axis + 1)
    return joined if joined.shape[axis] == size else joined.narrow(axis, 0, size)
