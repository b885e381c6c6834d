"""A quantised tensor: element values and block scales, as numbers and as codes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mxstudy.numerics.formats import FORMATS, ElementFormat, look_up
from mxstudy.numerics.grid import decode, encode, pack_pairs, to_dtype, unpack_pairs
from mxstudy.numerics.scales import decode_scales
from mxstudy.numerics.tiles import Tiles
from mxstudy.reader import ConfigError, require

CODE_DTYPES = {  # torch's one-byte dtype for a format's codes; a byte holds one code, or two of 4 bits
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
    "E2M1": torch.float4_e2m1fn_x2,
    "NVFP4": torch.float4_e2m1fn_x2,
}


@dataclass(frozen=True)
class Quantized:
    """A quantised tensor: `values` float32 on the element grid, x's shape, and `scales`, one per block along `axis`.

    `scales`: uint8 E8M0 codes, float8_e4m3fn for E4M3, else float32; x's shape with `axis` divided by the block size
    (both of the last two axes for two-dimensional blocks), rounded up: the last block may be incomplete.
    `tensor_scale`: a float32 factor beside the block scales, broadcast over them. `inside`: bool, whether an element
    was in the format's range before it was rounded.
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
    def tiles(self) -> Tiles:
        """Return the blocks of the values, which have a scale each."""
        return Tiles(self.values.shape, self.axis, self.block_size, self.two_dimensional)

    @property
    def scale_values(self) -> Tensor:
        """Return the factors that decode the values: float32, the shape of `scales`."""
        is_e8m0 = self.scales.dtype == torch.uint8
        scales = decode_scales(self.scales) if is_e8m0 else to_dtype(self.scales, torch.float32)
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    @property
    def codes(self) -> Tensor:
        """Return the codes, uint8: one per byte in x's shape.

        Codes of 4 bits are two per byte along `axis`, the first in the low nibble.
        """
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
        """Return the tensor that has these `codes` and `scales`, each uint8 or torch's dtype of the format.

        Raises ConfigError for other dtypes, for NVFP4 without a tensor scale and for MX with one.
        """
        element, axis = look_up(FORMATS, fmt, "format"), axis % codes.ndim
        codes = bytes_of(codes, "codes", CODE_DTYPES.get(fmt))
        if element.scale == "E8M0":
            require(tensor_scale is None, f"tensor_scale: {fmt} has none, only NVFP4 has one; leave it out")
            scales = bytes_of(scales, "scales", torch.float8_e8m0fnu)
        else:
            require(tensor_scale is not None, f"tensor_scale: {fmt} has one beside its block scales; give it")
            scales = bytes_of(scales, "scales", torch.float8_e4m3fn).view(torch.float8_e4m3fn)
        codes = unpack_pairs(codes, axis) if element.bits == 4 else codes
        return cls(decode(codes, element), scales, element, axis, block_size, tensor_scale)

    def without_tensor_scale(self) -> Quantized:
        """Return the tensor with a tensor scale of 1: the operand of a GEMM that scales its accumulator afterwards."""
        return self if self.tensor_scale is None else replace(self, tensor_scale=torch.ones_like(self.tensor_scale))

    def block_scales_along(self, axis: int) -> Tensor:
        """Return the scales as float32, one for every block of `axis` and every position of the other axis."""
        scales = self.scale_values
        if not self.two_dimensional:
            return scales
        other = 2 * self.values.ndim - 3 - axis  # the other one of the last two axes
        return scales.repeat_interleave(self.block_size, other).narrow(other, 0, self.values.shape[other])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return value times scale, rounded once to `dtype`; with E8M0 scales it is exact in float32 below 2^128.

        Under a tensor scale, both scales are first multiplied in float32.
        """
        tiles = self.tiles
        return to_dtype(tiles.join(tiles.split(self.values, pad=True) * tiles.spread(self.scale_values)), dtype)


def bytes_of(x: Tensor, what: str, dtype: torch.dtype | None) -> Tensor:
    """Return x, which is uint8 or `dtype`, as uint8. Raises ConfigError for another dtype."""
    choices = (torch.uint8,) if dtype is None else (torch.uint8, dtype)
    if x.dtype not in choices:
        raise ConfigError(f"{what}: {x.dtype}; give {' or '.join(map(str, choices))}")
    return x.view(torch.uint8)
