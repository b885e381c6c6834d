"""Norms fused with the linear layer that reads them: the RMS, exact or from block absmax, and its gradient.

    xbar = x / rms        forward operand: Q(xbar * gain), or Q(xbar) with the gain folded into the weight, Q(W * gain)

Statistics, xbar and gain * W are FP32 and go unrounded into the cast. The backward is that of RMSNorm with whatever
rms the forward used, a straight-through estimator when that is an estimate (MXNorm paper, section 3.7, appendix E).
LayerNorm is RMSNorm of x - mean(x), and may add a bias to xbar * gain; its dx is RMSNorm's less the mean of that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxstudy.compat.torch_compiler import constant
from mxstudy.config.casts import Gemms
from mxstudy.numerics.cast import BlockCast, Quantized, block_cast, split_blocks
from mxstudy.numerics.gemms import Decode, Linear, dgrad_gemm, forward_gemm, linear_of, wgrad_gemm
from mxstudy.numerics.grid import to_dtype
from mxstudy.reader import ConfigError, require


@constant
def rms_coefficient(p: float, block_size: int) -> float:
    """RMS over the p-mean of the block absmax, for Gaussian rows of infinitely many blocks.

    1 / c of MXNorm paper, Eq. 6, where c^p is the p-th moment of the largest of B half-normals.
    """
    if not 0 < p < math.inf:
        raise ConfigError(f"p: the exponent of the p-mean must be positive and finite, not {p}")
    if block_size < 1:
        raise ConfigError(f"block_size: {block_size} numbers are no block; give at least 1")
    return math.exp(-_log_moment(p, block_size) / p)


@functools.cache
def _log_moment(p: float, block_size: int) -> float:
    """log E[m^p] by quadrature over the density of m: in logarithms, for any p."""
    t = np.linspace(0, math.sqrt(p) + 12, 20_001)[1:]
    log_cdf = np.log([math.erf(value / math.sqrt(2)) for value in t])
    log_density = math.log(block_size * math.sqrt(2 / math.pi)) - t**2 / 2 + (block_size - 1) * log_cdf
    log_terms = p * np.log(t) + log_density
    peak = log_terms.max()
    return float(peak + math.log(np.exp(log_terms - peak).sum() * (t[1] - t[0])))


def rms_exact(x: Tensor, eps: float) -> Tensor:
    """sqrt(mean(x^2) + eps) over the last axis: float32, [..., 1]."""
    return torch.sqrt(to_dtype(x, torch.float32).square().mean(-1, keepdim=True) + eps)


def rms_estimate(x: Tensor, p: float, block_size: int, eps: float) -> Tensor:
    """coef(p, B) * G + eps, G the p-mean of the row's block absmax (MXNorm paper, Eq. 5 and 8): float32, [..., 1].

    The mean is taken of absmax over the row's largest, so that any p > 0 stays in range.
    """
    absmax = to_dtype(split_blocks(x, block_size, x.ndim - 1).abs().amax(-1), torch.float32)
    largest = absmax.amax(-1, keepdim=True)
    ratios = absmax / torch.where(largest == 0, 1.0, largest)
    mean = ratios.pow(p).mean(-1, keepdim=True).pow(1 / p)
    return rms_coefficient(p, block_size) * mean * largest + eps


def row_mean(x: Tensor) -> Tensor:
    """Over the last axis: float32, [..., 1]."""
    return to_dtype(x, torch.float32).mean(-1, keepdim=True)


def center(x: Tensor, mean: Tensor | None) -> Tensor:
    """x - mean in float32, and x itself where there is no mean."""
    return x if mean is None else to_dtype(x, torch.float32) - mean


def affine(xbar: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """xbar * gain + bias, in xbar's float32."""
    y = xbar * to_dtype(gain, torch.float32)
    return y if bias is None else y + to_dtype(bias, torch.float32)


def largest(gain_I: Tensor) -> Tensor:
    """|gain| of each replica, or |bias|: 0-dim, or [S, 1, 1]."""
    return gain_I.abs().amax(-1, keepdim=gain_I.ndim > 1)


def normalize(x: Tensor, rms: Tensor) -> Tensor:
    """x / rms in float32, rounded once: a product with 1 / rms would be rounded twice."""
    return to_dtype(x, torch.float32) / rms


def forward_sources(
    xbar_TI: Tensor, gain_I: Tensor, bias_I: Tensor | None, weight_OI: Tensor, bound: float, fold_gain: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What the forward GEMM quantises: the norm's output, float32; the weight, float32 with the gain where that is
    folded; and what no |output| exceeds, if no |xbar| exceeds `bound`.
    """
    bound_of_xbar = xbar_TI.new_full((), bound)
    if fold_gain:
        return xbar_TI, to_dtype(weight_OI, torch.float32) * to_dtype(gain_I, torch.float32), bound_of_xbar
    bound_of_y = affine(bound_of_xbar, largest(gain_I), None if bias_I is None else largest(bias_I))
    return affine(xbar_TI, gain_I, bias_I), weight_OI, bound_of_y


def norm_cast(x: Tensor, rms: Tensor, fmt: str, cast: BlockCast) -> Quantized:
    """x / rms to an MX tensor along the last axis; with `rms_estimate`, MXNorm (MXNorm paper, algorithm 2)."""
    return block_cast(normalize(x, rms), fmt, -1, cast)


def norm_linear(
    x: Tensor,
    gain: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    rms: Callable[[Tensor], Tensor],
    bound: float,
    fold_gain: bool,
    linear: Linear,
    centers: bool = False,
    rounded: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Norm, gain, the norm's bias and linear in one: x [..., in], gain and bias [in], weight [out, in] -> [..., out].

    Of a stack: [S, ..., in], [S, 1, in], [S, out, in] -> [S, ..., out]. `dtype`: of unquantised operands and of every
    GEMM's result; x's if not given. `rounded`: what the norm gives is rounded to x's dtype before it is cast; a folded
    gain leaves no choice. `rms` maps x, less its mean if the norm `centers`, to its float32 RMS or an estimate of it,
    [..., 1]; no gradient flows through it. `bound`: what no |xbar| exceeds. Raises ConfigError for a bias beside a
    folded gain.
    """
    require(bias is None or not fold_gain, "fold_gain: the weight takes up a gain, not a bias; one of them has to go")
    check_source(linear.gemms, fold_gain)
    stacked = weight.ndim - 2
    x_TI = x.flatten(stacked, -2)
    with torch.no_grad():
        mean_T1 = row_mean(x_TI) if centers else None
        rms_T1 = rms(center(x_TI, mean_T1))
    keys, places = linear.random or (None, None)
    settings = (bound, fold_gain, rounded, linear.gemms, linear.decode, dtype or x.dtype)
    h_TO = _NormLinear.apply(x_TI, mean_T1, rms_T1, gain, bias, weight, keys, places, *settings)
    return h_TO.unflatten(stacked, x.shape[stacked:-1])


def check_source(gemms: Gemms, fold_gain: bool) -> None:
    """Raise ConfigError where dgrad would read a forward weight that has the gain in it, which dgain is not made of."""
    takes_forward = gemms.dgrad_w is not None and gemms.dgrad_w.source == "forward"
    require(
        not (fold_gain and takes_forward),
        "dgrad_w.source: the forward's weight has the norm's gain folded into it, and the gain's gradient needs dgrad "
        "without; take source: high_precision, or a norm that does not fold",
    )


class _NormLinear(torch.autograd.Function):
    """Saves x, its mean and its rms, never xbar: that is elementwise operations away."""

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
        bound: float,
        fold_gain: bool,
        rounded: bool,
        gemms: Gemms,
        decode: Decode | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x_TI, mean_T1, rms_T1, gain_I, bias_I, weight_OI, keys, places)
        ctx.settings = bound, fold_gain, rounded, gemms, decode
        xbar_TI = normalize(center(x_TI, mean_T1), rms_T1)
        y_TI, weight, bound_of_y = forward_sources(xbar_TI, gain_I, bias_I, weight_OI, bound, fold_gain)
        y_TI = to_dtype(y_TI, x_TI.dtype) if rounded and not fold_gain else y_TI
        return forward_gemm(y_TI, weight, linear_of(gemms, keys, places, decode), dtype, bound_of_y)

    @staticmethod
    def backward(ctx: Any, dh_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, mean_T1, rms_T1, gain_I, bias_I, weight_OI, keys, places = ctx.saved_tensors
        bound, fold_gain, rounded, gemms, decode = ctx.settings
        linear = linear_of(gemms, keys, places, decode)
        gain, xbar = to_dtype(gain_I, torch.float32), normalize(center(x_TI, mean_T1), rms_T1)
        y_TI = xbar if fold_gain else affine(xbar, gain, bias_I)
        y_TI = to_dtype(y_TI, x_TI.dtype) if rounded and not fold_gain else y_TI
        weight, bound_of_y = weight_OI, None
        if gemms.reads_forward:
            _, weight, bound_of_y = forward_sources(xbar, gain_I, bias_I, weight_OI, bound, fold_gain)
        dy = dgrad_gemm(dh_TO, weight_OI, linear, y_TI, weight, bound_of_y)  # of xbar * gain, folded or not
        dweight = wgrad_gemm(dh_TO, y_TI, linear, weight, bound_of_y)
        dweight = to_dtype(dweight, torch.float32) * gain if fold_gain else dweight
        dx, dgain, dbias = norm_backward(
            to_dtype(dy, torch.float32), xbar, rms_T1, gain_I, bias_I, centers=mean_T1 is not None
        )
        dx, dweight = to_dtype(dx, x_TI.dtype), to_dtype(dweight, weight_OI.dtype)
        return dx, None, None, dgain, dbias, dweight, *(None,) * 8


def norm_backward(
    dy: Tensor, xbar: Tensor, rms: Tensor, gain: Tensor, bias: Tensor | None, centers: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From dy of y = xbar * gain + bias, all float32: dx float32, dgain and dbias in the dtypes of gain and bias."""
    dgain = to_dtype((xbar * dy).sum_to_size(gain.shape), gain.dtype)
    dbias = None if bias is None else to_dtype(dy.sum_to_size(bias.shape), bias.dtype)
    dxbar = dy * to_dtype(gain, torch.float32)
    dx = (dxbar - xbar * (dxbar * xbar).mean(-1, keepdim=True)) / rms
    return center(dx, row_mean(dx) if centers else None), dgain, dbias
