"""Run a Llama 3 block for inference: weights are quantised beforehand with gains folded in, activations on the fly.

Every linear reads codes and scales in the memory layout of hardware with MX GEMMs. A GPU without such GEMMs decodes
them and multiplies in bf16. This is emulation, and its decoding does not count as part of the layer. `decode` is a
separate operator, so that the compiler cannot fuse it with what comes before. The next norm computes the sum with the
residual stream, because it reads that stream anyway.
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
from mxstudy.numerics.formats import FORMATS
from mxstudy.numerics.norm_linear import rms_coefficient
from mxstudy.numerics.rotary import rotate
from mxstudy.numerics.scales import e4m3_outer_scale


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
    """An operand [rows, columns]: uint8 codes and scales, and NVFP4's tensor scale (a number or [rows, 1]), else 1."""

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | float


class Weights(NamedTuple):
    """A block's weights, bf16 [out, in], with values on the format's grid."""

    wqkv: Tensor
    wo: Tensor
    w13: Tensor
    w2: Tensor


NormCast = Callable[[Tensor, Tensor], tuple[Tensor, Codes]]  # (x, branch) -> their sum, and its norm as an operand


def bound(norm: str, columns: int, block_size: int) -> float:
    """Return an upper bound on |x / rms| (MXNorm paper, Lemmas 1 and 2)."""
    blocks = columns // block_size
    return columns**0.5 if norm == "rmsnorm" else blocks**0.5 / rms_coefficient(2.0, block_size)


def tensor_scale_of(norm: str, columns: int, precision: Precision) -> float | None:
    """Return NVFP4's tensor scale from the norm's bound, which needs no pass over x, or None for other formats."""
    if precision.format != "NVFP4":
        return None
    absmax = torch.tensor(bound(norm, columns, precision.block_size))
    return e4m3_outer_scale(absmax, FORMATS["NVFP4"].max).item()


def one_pass(norm: str, columns: int, precision: Precision) -> NormCast:
    """Return the norm and cast as our kernel `norm_codes`."""
    scale = tensor_scale_of(norm, columns, precision)
    row_norm = RowNorm(p=None if norm == "rmsnorm" else 2.0, eps=EPS)
    cast = BlockCast(precision.block_size)

    def norm_cast(x: Tensor, branch: Tensor) -> tuple[Tensor, Codes]:
        cast_x = norm_codes(x, row_norm, precision.format, cast, scale, branch)
        return cast_x.total, Codes(cast_x.codes, cast_x.scales.view(torch.uint8), scale or 1.0)

    return norm_cast


def plain(norm: str, columns: int, precision: Precision) -> NormCast:
    """Return the norm and cast in plain PyTorch, for torch.compile."""
    scale = tensor_scale_of(norm, columns, precision)

    def norm_cast(x: Tensor, branch: Tensor) -> tuple[Tensor, Codes]:
        total = x + branch
        blocks, absmax = normalised(norm, total, precision.block_size)
        return total, Codes(*mx_cast(blocks, absmax, precision.format, scale or 1.0), scale or 1.0)

    return norm_cast


KERNELS = {"compiled": plain, "one_pass": one_pass}


def cast_rows(x: Tensor, precision: Precision) -> Codes:
    """Return x cast to codes where no norm comes before. NVFP4 has a tensor scale per row."""
    blocks = x.float().unflatten(-1, (-1, precision.block_size))
    absmax = blocks.abs().amax(-1)
    scale: Tensor | float = 1.0
    if precision.format == "NVFP4":
        scale = (absmax.amax(-1, keepdim=True) / (6.0 * 448.0)).clamp_min(2.0**-120)
    return Codes(*mx_cast(blocks, absmax, precision.format, scale), scale)


def linear(x: Codes, weight: Tensor, precision: Precision) -> Tensor:
    """Return x weight^T in bf16. The GEMM is emulated."""
    y = decode(x.codes, x.scales, precision.format) @ weight.t()
    return y if precision.format != "NVFP4" else (y.float() * x.tensor_scale).to(torch.bfloat16)


def layer(
    x: Tensor, branch: Tensor, weights: Weights, rope: Tensor, size: Size, precision: Precision, norm_cast: NormCast
) -> tuple[Tensor, Tensor]:
    """Return x and branch of the next layer, bf16 [batch, sequence, hidden].

    The sum of x and branch is a layer's input.
    """
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
