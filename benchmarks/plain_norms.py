"""Norm and MX cast as one writes them in PyTorch and leaves to torch.compile: what our kernels are measured against.

The rules of the casts are the package's (rceil, half to even), and so is what is computed; x / rms is not rounded as
carefully. MXNorm takes the scales from the block maxima that its RMS comes from: nothing is reduced twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxstudy.numerics.formats import FORMATS, SCALE_RULES
from mxstudy.numerics.norm_linear import rms_coefficient

EPS = 1e-5
BETWEEN_E2M1 = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # the middle of neighbours; ties go to every other


def rmsnorm_cast(x: Tensor, fmt: str, block_size: int) -> tuple[Tensor, Tensor]:
    """x [rows, columns] bf16 -> codes and scales of x / RMS(x), uint8."""
    return mx_cast(*normalised("rmsnorm", x, block_size), fmt)


def mxnorm_cast(x: Tensor, fmt: str, block_size: int) -> tuple[Tensor, Tensor]:
    """The same with MXNorm's estimate of the RMS, p = 2 (MXNorm paper, algorithm 2)."""
    return mx_cast(*normalised("mxnorm", x, block_size), fmt)


def normalised(norm: str, x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The blocks of x / rms and their maxima, float32 [rows, blocks, B] and [rows, blocks]."""
    if norm == "rmsnorm":
        y = x.float()
        blocks = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)).unflatten(-1, (-1, block_size))
        return blocks, blocks.abs().amax(-1)
    blocks = x.unflatten(-1, (-1, block_size))
    absmax = blocks.abs().amax(-1).float()
    rms = rms_coefficient(2.0, block_size) * absmax.square().mean(-1, keepdim=True).sqrt() + EPS
    return blocks.float() / rms[..., None], absmax / rms


def mx_cast(blocks: Tensor, absmax: Tensor, fmt: str, tensor_scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Blocks and maxima, float32 [rows, blocks, B] and [rows, blocks] -> codes, of 4 bits two a byte, and scales.

    `tensor_scale`: of NVFP4 alone, of all rows or [rows, 1].
    """
    element = FORMATS[fmt]
    if element.scale == "E4M3":
        rounded = (absmax / 6.0 / tensor_scale).clamp(2.0**-6, 448.0).to(torch.float8_e4m3fn)
        scales, factor = rounded.view(torch.uint8), 1.0 / (rounded.float() * tensor_scale)
    else:
        bits = absmax.view(torch.int32)
        exponent = (((bits + SCALE_RULES["rceil"](element)) >> 23) - element.emax).clamp(0, 254)
        scales = torch.where(absmax < torch.inf, exponent, 0xFF).to(torch.uint8)
        factor = ((254 - exponent) << 23).view(torch.float32)
    scaled = (blocks * factor[..., None]).flatten(-2)
    if element.bits == 4:
        codes = e2m1_codes(scaled)
        return codes[..., ::2] | (codes[..., 1::2] << 4), scales
    dtype = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[fmt]
    return scaled.to(dtype).view(torch.uint8), scales


def e2m1_codes(x: Tensor) -> Tensor:
    """uint8, one a byte."""
    m = x.abs()
    passed = [m >= middle if i % 2 else m > middle for i, middle in enumerate(BETWEEN_E2M1)]
    return torch.where(x < 0, 8, 0).to(torch.uint8) + sum(each.to(torch.uint8) for each in passed)


NORMS = {"rmsnorm": rmsnorm_cast, "mxnorm": mxnorm_cast}
