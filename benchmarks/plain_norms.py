"""Compute norm and MX cast in plain PyTorch for torch.compile: the baseline of our kernels.

These functions compute the same as the package, with its rules for casts (rceil, half to even), but round x / rms less
carefully. MXNorm takes the scales from the same block absmax as its RMS, so nothing is reduced twice. torchao's cast of
torch's RMSNorm is what a user of both has; it rounds x / rms to bf16 first, unless the compiler drops that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mxstudy.numerics.formats import FORMATS, SCALE_RULES
from mxstudy.numerics.norm_linear import rms_coefficient

EPS = 1e-5
BETWEEN_E2M1 = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints of neighbours; ties go to even codes


def rmsnorm_cast(x: Tensor, fmt: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales, uint8, of x / RMS(x) for x [rows, columns] bf16."""
    return mx_cast(*normalised("rmsnorm", x, block_size), fmt)


def mxnorm_cast(x: Tensor, fmt: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the same as `rmsnorm_cast` with MXNorm's estimate of the RMS, p = 2 (MXNorm paper, algorithm 2)."""
    return mx_cast(*normalised("mxnorm", x, block_size), fmt)


def torchao_cast(x: Tensor, fmt: str, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the same as `rmsnorm_cast`, by torch's RMSNorm and torchao's cast."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    element = {"E4M3": torch.float8_e4m3fn, "E2M1": torch.float4_e2m1fn_x2}[fmt]
    y = F.rms_norm(x, x.shape[-1:], eps=EPS)
    made: Any = MXTensor.to_mx(y, element, block_size, ScaleCalculationMode.RCEIL)
    return made.qdata.view(torch.uint8), made.scale.view(torch.uint8)


def normalised(norm: str, x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the blocks of x / rms and their absmax, float32 [rows, blocks, B] and [rows, blocks]."""
    if norm == "rmsnorm":
        y = x.float()
        blocks = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS)).unflatten(-1, (-1, block_size))
        return blocks, blocks.abs().amax(-1)
    blocks = x.unflatten(-1, (-1, block_size))
    absmax = blocks.abs().amax(-1).float()
    rms = rms_coefficient(2.0, block_size) * absmax.square().mean(-1, keepdim=True).sqrt() + EPS
    return blocks.float() / rms[..., None], absmax / rms


def mx_cast(blocks: Tensor, absmax: Tensor, fmt: str, tensor_scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Return codes (4-bit ones two per byte) and scales, from float32 blocks and absmax as `normalised` returns them.

    `tensor_scale` is for NVFP4 alone, a number or [rows, 1].
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
    """Return the E2M1 codes of x: uint8, one per byte."""
    m = x.abs()
    passed = [m >= middle if i % 2 else m > middle for i, middle in enumerate(BETWEEN_E2M1)]
    return torch.where(x < 0, 8, 0).to(torch.uint8) + sum(each.to(torch.uint8) for each in passed)


NORMS = {"rmsnorm": rmsnorm_cast, "mxnorm": mxnorm_cast}
PEERS = NORMS | {"torchao": torchao_cast}
