"""A quantised tensor: element values, block scales, and the bits of both."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxstudy.numerics.formats import FORMATS, ElementFormat, look_up
from mxstudy.numerics.grid import decode, encode, pack_pairs, to_dtype, unpack_pairs
from mxstudy.numerics.scales import decode_scales
from mxstudy.numerics.tiles import Tiles
from mxstudy.reader import ConfigError, require

CODE_DTYPES = {  # torch's own of one byte each, which is two codes of 4 bits
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
    "E2M1": torch.float4_e2m1fn_x2,
    "NVFP4": torch.float4_e2m1fn_x2,
}


@dataclass(frozen=True)
class Quantized:
    """`values` float32 on the element grid, x's shape; `scales` uint8 E8M0 codes, `axis` divided by the block size.

    The last block may be a part of one. Of blocks of two dimensions both axes of `scales` are divided. E4M3 scales are
    float8_e4m3fn, others float32. `tensor_scale`: float32, what is multiplied beside the block scales to decode; it
    broadcasts over the scales. `inside`: bool, whether an element was in the format's range before it was rounded.
    """

    values: Tensor
    scales: Tensor
    format: ElementFormat
    axis: int
    block_size: int
    tensor_scale: Tensor | None = None
    two_dimensional: bool = False
    inside: Tensor | None = None

    @property
    def scale_values(self) -> Tensor:
        """What values are multiplied with to decode them: float32, the shape of `scales`."""
        is_e8m0 = self.scales.dtype == torch.uint8
        scales = decode_scales(self.scales) if is_e8m0 else to_dtype(self.scales, torch.float32)
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    @property
    def codes(self) -> Tensor:
        """uint8, one element a byte and x's shape; of 4 bits two a byte along `axis`, the first in the low nibble."""
        codes = encode(self.values, self.format)
        return pack_pairs(codes, self.axis) if self.format.bits == 4 else codes

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scales: Tensor,
        fmt: str,
        axis: int,
        block_size: int,
        tensor_scale: Tensor | None = None,
    ) -> Quantized:
        """The tensor of which `codes` and `scales` are these: uint8, or torch's dtype of that format.

        Raises ConfigError for other dtypes, for NVFP4 without a tensor scale and for MX with one.
        """
        element, axis = look_up(FORMATS, fmt, "format"), axis % codes.ndim
        codes = bytes_of(codes, "codes", CODE_DTYPES.get(fmt))
        if element.scale == "E8M0":
            require(tensor_scale is None, f"tensor_scale: {fmt} has none; NVFP4 has")
            scales = bytes_of(scales, "scales", torch.float8_e8m0fnu)
        else:
            require(tensor_scale is not None, f"tensor_scale: {fmt} has one beside its block scales; give that")
            scales = bytes_of(scales, "scales", torch.float8_e4m3fn).view(torch.float8_e4m3fn)
        codes = unpack_pairs(codes, axis) if element.bits == 4 else codes
        return cls(decode(codes, element), scales, element, axis, block_size, tensor_scale)

    def without_tensor_scale(self) -> Quantized:
        """Itself with a tensor scale of 1: what a GEMM multiplies before it scales its accumulator."""
        assert self.tensor_scale is not None
        return replace(self, tensor_scale=torch.ones_like(self.tensor_scale))

    def block_scales_along(self, axis: int) -> Tensor:
        """The scales that values are multiplied with, float32, one for every block of `axis` and place of the other."""
        scales = self.scale_values
        if not self.two_dimensional:
            return scales
        other = 2 * self.values.ndim - 3 - axis  # of the last two axes
        return scales.repeat_interleave(self.block_size, other).narrow(other, 0, self.values.shape[other])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Value times scale, rounded once to `dtype`; with E8M0 scales exact in float32 below 2^128."""
        tiles = Tiles(self.values.shape, self.axis, self.block_size, self.two_dimensional)
        return to_dtype(tiles.join(tiles.split(self.values, pad=True) * tiles.spread(self.scale_values)), dtype)


def bytes_of(x: Tensor, what: str, dtype: torch.dtype | None) -> Tensor:
    """x, uint8 or of `dtype`, as uint8; ConfigError for another."""
    choices = (torch.uint8,) if dtype is None else (torch.uint8, dtype)
    if x.dtype not in choices:
        raise ConfigError(f"{what}: {x.dtype}; give {' or '.join(map(str, choices))}")
    return x.view(torch.uint8)
