"""A weight that was gathered over ranks as what one GEMM reads: codes and scales instead of numbers.

A scale belongs to one block, so ranks whose shards are complete blocks cast without agreeing on anything first, and
their codes and scales one below the other are those of the whole weight. Column-wise codes cannot be computed from
row-wise ones, so the forward and dgrad have a gather each (Transformer Engine, MXFP8). Scales are in the matrix's order
until the GEMM: in the order that the hardware's GEMM wants they could not be put one below the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy.compat.torch_fsdp import stand_in
from mxstudy.config.casts import Cast
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.formats import FORMATS
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.quantized import CODE_DTYPES, Quantized
from mxstudy.numerics.scales import decode_scales
from mxstudy.numerics.tiles import Tiles
from mxstudy.reader import require

# What makes a parameter of a tensor: the whole of it, anew.
ANEW = (torch.ops.aten.as_strided.default, torch.ops.aten.detach.default)


class Coding(NamedTuple):
    """How a weight of that size is coded: its cast, along the axis -1 (row-wise) or -2 (column-wise)."""

    size: torch.Size
    cast: Cast
    axis: int

    def encode(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales, uint8, of some of the rows."""
        quantized = quantize_as(shard, self.cast, self.axis)
        return quantized.codes.contiguous(), quantized.scales.contiguous()


class GatheredWeight(Tensor):
    """A weight [out, in] of which there are codes and scales alone; it has the shape and dtype that its gradient takes.

    It is an operand of the GEMM that its `coding` is for. No other operation can read it.
    """

    coding: Coding
    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, coding: Coding, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> GatheredWeight:
        return stand_in(cls, coding.size, dtype, codes.device).filled(coding, codes, scales)

    def filled(self, coding: Coding, codes: Tensor, scales: Tensor) -> GatheredWeight:
        """Take other codes and scales, and return the weight."""
        self.coding, self.codes, self.scales = coding, codes, scales
        return self

    def quantized(self, axis: int) -> Quantized:
        """Return the operand whose contraction axis that is, -2 or -1. Raises ConfigError if it was not gathered."""
        _, cast, own = self.coding
        require(axis == own, f"train.all_gather: the GEMM contracts axis {axis}, and axis {own} was gathered")
        return Quantized.from_codes(self.codes, self.scales, cast.format, axis, cast.block_size or 0)

    def decoded(self, axis: int, dtype: torch.dtype) -> Tensor:
        """Return what `quantized(axis).dequantize(dtype)` does; codes of 8 bits are decoded by torch's own dtypes."""
        size, cast, own = self.coding
        if axis != own or FORMATS[cast.format].bits < 8 or cast.format not in CODE_DTYPES:
            return self.quantized(axis).dequantize(dtype)
        tiles = Tiles(size, axis % 2, cast.block_size or 0)
        values = to_dtype(self.codes.view(CODE_DTYPES[cast.format]), dtype)
        return tiles.join(tiles.split(values) * tiles.spread(to_dtype(decode_scales(self.scales), dtype)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> GatheredWeight:
        if function not in ANEW:
            raise NotImplementedError(f"{function} of a gathered weight, which is nothing but an operand of a GEMM")
        weight: GatheredWeight = args[0]
        return cls.of(weight.coding, weight.codes, weight.scales, weight.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GatheredWeight({list(self.shape)}, axis {self.coding.axis}, {self.coding.cast.format})"
