"""Norms fused with the linear layer that reads them: the RMS, exact or from block absmax, and its gradient.

    xbar = x / rms        forward operand: Q(xbar * gain), or Q(xbar) with the gain folded into the weight, Q(W * gain)

Statistics, xbar and gain * W are FP32 and enter the cast unrounded. The backward is that of RMSNorm with the forward's
rms; if that is an estimate, the backward is a straight-through estimator (MXNorm paper, section 3.7, appendix E).
LayerNorm is RMSNorm of x - mean(x), optionally with a bias added to xbar * gain; its dx is RMSNorm's dx minus its mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxstudy.compat.torch_compiler import constant
from mxstudy.config.casts import Gemms
from mxstudy.config.model import check_exponent
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.gathered_weight import GatheredWeight
from mxstudy.numerics.gemms import Bounds, CastKernel, Decode, Linear, dgrad_gemm, forward_gemm, linear_of, wgrad_gemm
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.quantized import Quantized
from mxstudy.numerics.tiles import split_blocks
from mxstudy.reader import ConfigError, require


@constant
def rms_coefficient(p: float, block_size: int) -> float:
    """Return the RMS / p-mean of the block absmax, for Gaussian rows of infinitely many blocks.

    This is 1 / c of MXNorm paper, Eq. 6, where c^p is the p-th moment of the largest of B half-normals.
    """
    check_exponent(p)
    if block_size < 1:
        raise ConfigError(f"block_size: {block_size} is not a block size; give at least 1")
    return math.exp(-_log_moment(p, block_size) / p)


@functools.cache
def _log_moment(p: float, block_size: int) -> float:
    """Return log E[m^p] by quadrature over the density of m, in logarithms so that any p stays in range."""
    t = np.linspace(0, math.sqrt(p) + 12, 20_001)[1:]
    log_cdf = np.log([math.erf(value / math.sqrt(2)) for value in t])
    log_density = math.log(block_size * math.sqrt(2 / math.pi)) - t**2 / 2 + (block_size - 1) * log_cdf
    log_terms = p * np.log(t) + log_density
    peak = log_terms.max()
    return float(peak + math.log(np.exp(log_terms - peak).sum() * (t[1] - t[0])))


def rms_exact(x: Tensor, eps: float) -> Tensor:
    """Return sqrt(mean(x^2) + eps) over the last axis: float32, [..., 1]."""
    return torch.sqrt(to_dtype(x, torch.float32).square().mean(-1, keepdim=True) + eps)


def rms_estimate(x: Tensor, p: float, block_size: int, eps: float) -> Tensor:
    """Return coef(p, B) * G + eps, float32 [..., 1], G the p-mean of block absmax (MXNorm paper, Eq. 5 and 8).

    The p-mean is taken of absmax / the row's largest absmax, so that any p > 0 stays in range.
    """
    coefficient = rms_coefficient(p, block_size)
    absmax = to_dtype(split_blocks(x, block_size, x.ndim - 1).abs().amax(-1), torch.float32)
    largest = absmax.amax(-1, keepdim=True)
    ratios = absmax / torch.where(largest == 0, 1.0, largest)
    mean = ratios.pow(p).mean(-1, keepdim=True).pow(1 / p)
    return coefficient * mean * largest + eps


def row_mean(x: Tensor) -> Tensor:
    """Return the mean over the last axis: float32, [..., 1]."""
    return to_dtype(x, torch.float32).mean(-1, keepdim=True)


def center(x: Tensor, mean: Tensor | None) -> Tensor:
    """Return x - mean in float32, or x itself without a mean."""
    return x if mean is None else to_dtype(x, torch.float32) - mean


def affine(xbar: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """Return xbar * gain + bias in float32."""
    y = xbar * to_dtype(gain, torch.float32)
    return y if bias is None else y + to_dtype(bias, torch.float32)


def vector_absmax(gain_I: Tensor) -> Tensor:
    """Return the largest |gain|, or |bias|, of each replica: 0-dim, or [S, 1, 1]."""
    return gain_I.abs().amax(-1, keepdim=gain_I.ndim > 1)


def normalize(x: Tensor, rms: Tensor) -> Tensor:
    """Return x / rms in float32, rounded once; multiplying by 1 / rms would round twice."""
    return to_dtype(x, torch.float32) / rms


def as_read(
    xbar: Tensor, gain: Tensor, bias: Tensor | None, fold_gain: bool, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the norm's output as its readers read it: xbar * gain + bias in `dtype`, or xbar if the gain is folded."""
    return xbar if fold_gain else to_dtype(affine(xbar, gain, bias), dtype)


@dataclass(frozen=True)
class NormBounds:
    """Upper bounds of |xbar|: under the forward's transform in tiles of `tile` features (1: none), and without it.

    `forward` also bounds |xbar * gain| / max |gain|, because multiplying by gain / max |gain| does not lengthen xbar.
    With a folded gain there is nothing to multiply.
    """

    forward: float
    plain: float
    tile: int = 1


def weight_and_bounds(
    weight: Tensor, gain: Tensor | None, bias: Tensor | None, bounds: NormBounds | None, fold_gain: bool
) -> tuple[Tensor, Bounds | None]:
    """Return a reader's weight as the forward quantises it, and upper bounds of its input.

    Without a norm, `gain` and `bounds` are None, and there are no upper bounds.
    """
    if gain is None or bounds is None:
        return weight, None
    forward, plain = (gain.new_full((), bound, dtype=torch.float32) for bound in (bounds.forward, bounds.plain))
    if fold_gain:
        return times_gain(weight, gain), Bounds(forward, plain)
    most = None if bias is None else vector_absmax(bias)
    of_bias = None if most is None else most * bounds.tile**0.5
    of_gain = vector_absmax(gain)
    return weight, Bounds(affine(forward, of_gain, of_bias), affine(plain, of_gain, most))


def times_gain(weight: Tensor, gain: Tensor) -> Tensor:
    """Return a weight, or its gradient, times the gain, float32; a gathered weight has it already."""
    if isinstance(weight, GatheredWeight):
        return weight
    return to_dtype(weight, torch.float32) * to_dtype(gain, torch.float32)


def norm_cast(x: Tensor, rms: Tensor, fmt: str, cast: BlockCast) -> Quantized:
    """Return x / rms as an MX tensor along the last axis; with `rms_estimate`, MXNorm (MXNorm paper, algorithm 2)."""
    return block_cast(normalize(x, rms), fmt, -1, cast)


def norm_linear(
    x: Tensor,
    gain: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rms: Callable[[Tensor], Tensor],
    bounds: NormBounds,
    fold_gain: bool,
    linear: Linear,
    fold_gain_in_dgrad: bool = False,
    centers: bool = False,
    rounded: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return linear(norm(x) * gain + bias): x [..., in], gain and bias [in], weight [out, in] -> [..., out].

    For a stack: [S, ..., in], [S, 1, in], [S, out, in] -> [S, ..., out]. `dtype`: that of unquantised operands and of
    every GEMM's result; x's by default. `rounded`: round the norm's output to x's dtype before the cast; ignored with a
    folded gain. `rms` maps x (minus its mean if the norm `centers`) to its float32 RMS or an estimate of it, [..., 1];
    no gradient flows through it. `bounds`: upper bounds of |xbar|. `fold_gain_in_dgrad`: dgrad multiplies with W * gain
    too, and the gain's gradient comes from wgrad. Raises ConfigError for a bias with a folded gain.
    """
    require(bias is None or not fold_gain, "fold_gain: the weight takes up a gain, not a bias; leave one of them out")
    check_source(linear.gemms, fold_gain and not fold_gain_in_dgrad)
    stacked = weight.ndim - 2
    x_TI = x.flatten(stacked, -2)
    with torch.no_grad():
        mean_T1 = row_mean(x_TI) if centers else None
        rms_T1 = rms(center(x_TI, mean_T1))
    keys, places = linear.random or (None, None)
    output_dtype = x.dtype if rounded else torch.float32
    settings = bounds, fold_gain, fold_gain_in_dgrad, output_dtype, linear.gemms, linear.decode, linear.kernel
    h_TO = _NormLinear.apply(x_TI, mean_T1, rms_T1, gain, bias, weight, keys, places, *settings, dtype or x.dtype)
    return h_TO.unflatten(stacked, x.shape[stacked:-1])


def check_source(gemms: Gemms, folds_in_forward_alone: bool) -> None:
    """Raise ConfigError if dgrad would read a weight with the gain folded in, although dgain must come from dgrad."""
    takes_forward = gemms.dgrad_w is not None and gemms.dgrad_w.source == "forward"
    require(
        not (folds_in_forward_alone and takes_forward),
        "dgrad_w.source: the forward's weight has the norm's gain folded into it, but the gain's gradient needs a "
        "dgrad without it; take source: high_precision, a norm that does not fold, or norm.fold_gain_in_dgrad=true",
    )


class _NormLinear(torch.autograd.Function):
    """Norm and linear as one autograd function, which saves x, its mean and its rms; it recomputes xbar elementwise."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        mean_T1: Tensor | None,
        rms_T1: Tensor,
        gain_I: Tensor,
        bias_I: Tensor | None,
        weight_OI: Tensor,
        keys: Tensor | None,
        places: Tensor | None,
        bounds: NormBounds,
        fold_gain: bool,
        fold_gain_in_dgrad: bool,
        output_dtype: torch.dtype,
        gemms: Gemms,
        decode: Decode | None,
        kernel: CastKernel | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x_TI, mean_T1, rms_T1, gain_I, bias_I, weight_OI, keys, places)
        ctx.settings = bounds, fold_gain, fold_gain_in_dgrad, output_dtype, gemms, decode, kernel
        xbar_TI = normalize(center(x_TI, mean_T1), rms_T1)
        weight, bounds_of_y = weight_and_bounds(weight_OI, gain_I, bias_I, bounds, fold_gain)
        y_TI = as_read(xbar_TI, gain_I, bias_I, fold_gain, output_dtype)
        return forward_gemm(y_TI, weight, linear_of(gemms, keys, places, decode, kernel), dtype, bounds_of_y)

    @staticmethod
    def backward(ctx: Any, dh_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, mean_T1, rms_T1, gain_I, bias_I, weight_OI, keys, places = ctx.saved_tensors
        bounds, fold_gain, fold_gain_in_dgrad, output_dtype, gemms, decode, kernel = ctx.settings
        linear = linear_of(gemms, keys, places, decode, kernel)
        xbar = normalize(center(x_TI, mean_T1), rms_T1)
        y_TI = as_read(xbar, gain_I, bias_I, fold_gain, output_dtype)
        weight, bounds_of_y = weight_and_bounds(weight_OI, gain_I, bias_I, bounds, fold_gain)
        of_dgrad = weight if fold_gain_in_dgrad else weight_OI
        # the gradient of xbar * gain, folded or not; of xbar alone if the gain is folded in dgrad too
        dy = to_dtype(dgrad_gemm(dh_TO, of_dgrad, linear, y_TI, weight, bounds_of_y), torch.float32)
        dweight = wgrad_gemm(dh_TO, y_TI, linear, weight, bounds_of_y)
        if fold_gain_in_dgrad:
            dgain, dbias = gain_backward(dweight, weight_OI, gain_I), None
            dx = divisor_backward(dy, xbar, rms_T1, centers=mean_T1 is not None)
        else:
            dx, dgain, dbias = norm_backward(dy, xbar, rms_T1, gain_I, bias_I, centers=mean_T1 is not None)
        dweight = times_gain(dweight, gain_I) if fold_gain else dweight
        dx, dweight = to_dtype(dx, x_TI.dtype), to_dtype(dweight, weight_OI.dtype)
        return dx, None, None, dgain, dbias, dweight, *(None,) * 10


def norm_backward(
    dy: Tensor, xbar: Tensor, rms: Tensor, gain: Tensor, bias: Tensor | None, centers: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return dx (float32), and dgain and dbias in gain's and bias's dtypes, from float32 dy of xbar * gain + bias."""
    dgain = to_dtype((xbar * dy).sum_to_size(gain.shape), gain.dtype)
    dbias = None if bias is None else to_dtype(dy.sum_to_size(bias.shape), bias.dtype)
    return divisor_backward(dy * to_dtype(gain, torch.float32), xbar, rms, centers), dgain, dbias


def divisor_backward(dxbar: Tensor, xbar: Tensor, rms: Tensor, centers: bool) -> Tensor:
    """Return dx, float32, from float32 dxbar."""
    dx = (dxbar - xbar * (dxbar * xbar).mean(-1, keepdim=True)) / rms
    return center(dx, row_mean(dx) if centers else None)


def gain_backward(dfolded: Tensor, weight: Tensor, gain: Tensor) -> Tensor:
    """Return dgain in gain's dtype: the gradient of W * gain, times W, summed over the outputs."""
    products = to_dtype(dfolded, torch.float32) * to_dtype(weight, torch.float32)
    return to_dtype(products.sum(-2, keepdim=True).view_as(gain), gain.dtype)
