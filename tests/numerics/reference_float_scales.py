"""Compute casts whose scales are no powers of two, NVFP4 and one scale per tensor, in float32 numpy.

Each operation rounds to float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from reference import ELEMENTS, Array, round_to, to_dtype

Float32s = NDArray[np.float32]


def fill_scale(absmax: Array, largest: float, least: float) -> Float32s:
    """Return absmax / largest rounded to float32, at least `least`, or NaN where absmax is not finite."""
    absmax = np.asarray(absmax, np.float32)
    scale = np.maximum(absmax / np.float32(largest), np.float32(least))
    return np.where(np.isfinite(absmax), scale, np.float32(np.nan))


def saturate(x: Float32s, name: str, rounding: str) -> Array:
    """Return x on the element grid, with NaN kept."""
    element, wide = ELEMENTS[name], x.astype(np.float64)
    rounded = round_to(np.clip(np.nan_to_num(wide, nan=0.0), -element.max, element.max), element, rounding)
    return np.where(np.isnan(wide), np.nan, rounded)


def tensor_cast_array(x: Array, name: str, rounding: str = "even") -> tuple[Array, Float32s]:
    """Return x / scale on the element grid, and that scale, 0-dim: absmax / max of the tensor, at least 2^-126."""
    x = np.asarray(x, np.float32)
    scale = fill_scale(np.abs(x).max(), ELEMENTS[name].max, 2.0**-126)
    return saturate(x / scale, name, rounding), scale


def nvfp4_tensor_scale(absmax: Array) -> Float32s:
    """Return absmax / (6 * 448), at least 2^-120.

    Below 2^-121 its reciprocal divided by the least block scale would overflow.
    """
    return fill_scale(absmax, 6.0 * 448.0, 2.0**-120)


def nvfp4_array(
    x: Array, tensor_scale: Array | float | None = None, axis: int = -1, rounding: str = "even"
) -> tuple[Array, Array, Float32s]:
    """Return E2M1 elements in x's shape, the values of the E4M3 block scales, and the float32 tensor scale.

    The block scales have x's shape with `axis` divided by 16. A block's scale is fp32(fp32(absmax / 6) / tensor scale),
    at least 2^-6, half to even on E4M3's grid, saturated. Elements are fp32(x * fp32(fp32(1 / tensor scale) / scale)).
    A given `tensor_scale` broadcasts over the scales.
    """
    blocks = np.moveaxis(np.asarray(x, np.float32), axis, -1)
    shape = blocks.shape
    blocks = blocks.reshape(*shape[:-1], -1, 16)
    absmax = np.abs(blocks).max(-1)
    tensor_scale = np.asarray(nvfp4_tensor_scale(absmax.max()) if tensor_scale is None else tensor_scale, np.float32)
    spread = np.moveaxis(np.broadcast_to(tensor_scale, np.moveaxis(absmax, -1, axis).shape), axis, -1)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = saturate(np.maximum(absmax / np.float32(6) / spread, np.float32(2.0**-6)), "E4M3", "even")
        scales = np.where(np.isfinite(absmax), scales, np.nan)
        reciprocal = np.float32(1) / spread / scales.astype(np.float32)
        values = saturate(blocks * reciprocal[..., None], "E2M1", rounding).reshape(shape)
    return np.moveaxis(values, -1, axis), np.moveaxis(scales, -1, axis), tensor_scale


def nvfp4_dequantize_array(
    values: Array, scales: Array, tensor_scale: Array | float, axis: int = -1, dtype: str = "float32"
) -> Array:
    """Return fp32(value * fp32(scale * tensor scale)), converted to `dtype`."""
    product = scales.astype(np.float32) * np.asarray(tensor_scale, np.float32)
    with np.errstate(over="ignore"):
        decoded = values.astype(np.float32) * np.repeat(product, 16, axis)
    return to_dtype(decoded.astype(np.float64), dtype)
