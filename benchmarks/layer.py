"""A block of Llama 3 as inference has it: weights quantised beforehand with the gains in them, activations on the way.

Every linear reads codes and scales, which lie in memory as hardware with MX GEMMs reads them. A GPU without such GEMMs
decodes them (`decode`, an operator of its own, so that no compiler joins it to what comes before) and multiplies in
bf16: that is the emulation, and its decoding is no part of the layer. The sum with the residual stream is left to the
next norm, which reads it anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decode import decode
from benchmarks.plain_norms import EPS, mx_cast, normalised
from mxstudy.kernels import RowNorm, norm_codes
from mxstudy.model.activation_functions import swiglu
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.norm_linear import rms_coefficient
from mxstudy.numerics.rotary import rotate
from mxstudy.numerics.scales import nvfp4_tensor_scale


class Size(NamedTuple):
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int

    @property
    def head(self) -> int:
        return self.hidden // self.heads


class Precision(NamedTuple):
    format: str
    block_size: int


SIZES = {"llama3_8b": Size(4096, 14336, 32, 8, 8), "tiny": Size(64, 128, 4, 2, 4)}
PRECISIONS = {"MXFP8": Precision("E4M3", 32), "NVFP4": Precision("NVFP4", 16)}
NORMS = ("rmsnorm", "mxnorm")


class Codes(NamedTuple):
    """An operand [rows, columns]: uint8 codes and scales; NVFP4's tensor scale, of all rows or [rows, 1], else 1."""

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | float


class Weights(NamedTuple):
    """bf16 [out, in] on the grid of the format."""

    wqkv: Tensor
    wo: Tensor
    w13: Tensor
    w2: Tensor


NormCast = Callable[[Tensor, Tensor], tuple[Tensor, Codes]]  # of x and branch: their sum, and the operand


def bound(norm: str, columns: int, block_size: int) -> float:
    """What no |x / rms| exceeds (MXNorm paper, Lemmas 1 and 2)."""
    blocks = columns // block_size
    return columns**0.5 if norm == "rmsnorm" else blocks**0.5 / rms_coefficient(2.0, block_size)


def tensor_scale_of(norm: str, columns: int, precision: Precision) -> float | None:
    """NVFP4's that needs no pass over x."""
    if precision.format != "NVFP4":
        return None
    return nvfp4_tensor_scale(torch.tensor(bound(norm, columns, precision.block_size))).item()


def one_pass(norm: str, columns: int, precision: Precision) -> NormCast:
    scale = tensor_scale_of(norm, columns, precision)
    row_norm = RowNorm(p=None if norm == "rmsnorm" else 2.0, eps=EPS)
    cast = BlockCast(precision.block_size)

    def norm_cast(x: Tensor, branch: Tensor) -> tuple[Tensor, Codes]:
        found = norm_codes(x, row_norm, precision.format, cast, scale, branch)
        return found.total, Codes(found.codes, found.scales.view(torch.uint8), scale or 1.0)

    return norm_cast


def plain(norm: str, columns: int, precision: Precision) -> NormCast:
    """For torch.compile."""
    scale = tensor_scale_of(norm, columns, precision)

    def norm_cast(x: Tensor, branch: Tensor) -> tuple[Tensor, Codes]:
        total = x + branch
        blocks, absmax = normalised(norm, total, precision.block_size)
        return total, Codes(*mx_cast(blocks, absmax, precision.format, scale or 1.0), scale or 1.0)

    return norm_cast


KERNELS = {"compiled": plain, "one_pass": one_pass}


def cast_rows(x: Tensor, precision: Precision) -> Codes:
    """Of what comes from no norm: NVFP4 with a tensor scale a row."""
    blocks = x.float().unflatten(-1, (-1, precision.block_size))
    absmax = blocks.abs().amax(-1)
    scale: Tensor | float = 1.0
    if precision.format == "NVFP4":
        scale = (absmax.amax(-1, keepdim=True) / (6.0 * 448.0)).clamp_min(2.0**-120)
    return Codes(*mx_cast(blocks, absmax, precision.format, scale), scale)


def linear(x: Codes, weight: Tensor, precision: Precision) -> Tensor:
    """bf16; the GEMM is emulated."""
    y = decode(x.codes, x.scales, precision.format) @ weight.t()
    return y if precision.format != "NVFP4" else (y.float() * x.tensor_scale).to(torch.bfloat16)


def layer(
    x: Tensor, branch: Tensor, weights: Weights, rope: Tensor, size: Size, precision: Precision, norm_cast: NormCast
) -> tuple[Tensor, Tensor]:
    """x and branch [batch, sequence, hidden] bf16, to be added -> the same for the next layer."""
    batch, sequence, _ = x.shape
    x, operand = norm_cast(x.flatten(0, 1), branch.flatten(0, 1))
    qkv = linear(operand, weights.wqkv, precision).unflatten(0, (batch, sequence))
    heads = (size.heads, size.kv_heads, size.kv_heads)
    q, k, v = (y.unflatten(-1, (-1, size.head)) for y in qkv.split([n * size.head for n in heads], -1))
    q, k, v = (y.transpose(1, 2) for y in (rotate(q, rope), rotate(k, rope), v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    attended = linear(cast_rows(attended.flatten(0, 1), precision), weights.wo, precision)
    h, operand = norm_cast(x, attended)
    up = swiglu(linear(operand, weights.w13, precision))
    out = linear(cast_rows(up, precision), weights.w2, precision)
    return h.unflatten(0, (batch, sequence)), out.unflatten(0, (batch, sequence))
