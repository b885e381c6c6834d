"""A weight that ranks have gathered as the codes and scales that one GEMM reads.

A scale belongs to one block. So ranks whose shards are complete blocks cast them independently, and their codes and
scales, concatenated, are those of the whole weight. Column-wise codes cannot be computed from row-wise ones, so the
forward and dgrad have a gather each (Transformer Engine, MXFP8). Scales stay in the matrix's order until the GEMM,
because in the order of the hardware's GEMM they could not be concatenated.
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

# The functions that make a new parameter from a tensor.
ANEW = (torch.ops.aten.as_strided.default, torch.ops.aten.detach.default)


class Coding(NamedTuple):
    """The coding of a weight of that size: its cast, along the axis -1 (row-wise) or -2 (column-wise)."""

    size: torch.Size
    cast: Cast
    axis: int

    def encode(self, shard: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales, uint8, of some of the rows."""
        quantized = quantize_as(shard, self.cast, self.axis)
        return quantized.codes.contiguous(), quantized.scales.contiguous()


class GatheredWeight(Tensor):
    """A weight [out, in] given only as codes and scales; it has the shape and dtype of its gradient.

    It is an operand of the GEMM that its `coding` is for. No other operation can read it.
    """

    coding: Coding
    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, coding: Coding, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> GatheredWeight:
        """Return the weight with these codes and scales; `dtype`: that of its gradient."""
        return stand_in(cls, coding.size, dtype, codes.device).filled(coding, codes, scales)

    def filled(self, coding: Coding, codes: Tensor, scales: Tensor) -> GatheredWeight:
        """Take other codes and scales, and return the weight."""
        self.coding, self.codes, self.scales = coding, codes, scales
        return self

    def quantized(self, axis: int) -> Quantized:
        """Return the operand with this contraction axis, -2 or -1. Raises ConfigError if another one was gathered."""
        _, cast, own = self.coding
        require(axis == own, f"train.all_gather: the GEMM contracts axis {axis}, and axis {own} was gathered")
        return Quantized.from_codes(self.codes, self.scales, cast.format, axis, cast.block_size or 0)

    def decoded(self, axis: int, dtype: torch.dtype) -> Tensor:
        """Return the same as `quantized(axis).dequantize(dtype)`; torch's own dtypes decode codes of 8 bits."""
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
