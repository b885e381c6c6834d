"""Compute the three GEMMs in float64, and how much a float32 GEMM over the same operands may differ.

The references multiply in float64 what reference.py quantised. A float32 GEMM over n terms errs by at most n * 2^-24 of
the product of the absolute values; a bf16 result must be what one rounding of a number in that interval gives. With
operands that vary in scale along both axes, E4M3's error is far outside of it, so a swapped axis cannot pass.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import torch
from reference import Array, fake_quantize_array, to_dtype
from reference_float_scales import nvfp4_array, nvfp4_tensor_scale, tensor_cast_array

from mxstudy.config import BlockCast, Cast, Gemms
from mxstudy.config.recipes import tensor_scaled
from mxstudy.kernels.native import mx_tensor
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.gemms import Linear, mx_linear

TOKENS, IN, OUT = 128, 192, 320  # all different, and multiples of 64
UNQUANTISED = Gemms()
CAST = BlockCast()


def linear(gemms: Gemms, cast: BlockCast = CAST, native: bool = False) -> Linear:
    """Return the arithmetic of a linear with that recipe under these settings of the run."""
    return Linear(gemms.filled(cast), decode=mx_tensor if native else None)


def tensor_cast(x: torch.Tensor, fmt: str, cast: BlockCast = CAST) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x on the element grid, and the one scale of all of it."""
    got = quantize_as(x, tensor_scaled(fmt).filled(cast), -1)
    assert got.tensor_scale is not None
    return got.values, got.tensor_scale


def one_operand(name: str, fmt: str) -> Gemms:
    """Return the recipe that quantises that operand alone."""
    return Gemms(**{name: Cast(format=fmt)})


class Gemm(NamedTuple):
    """A product in float64 and the interval in which a float32 GEMM over these operands must lie."""

    exact: Array
    slack: Array


def gemm(a: Array, b: Array) -> Gemm:
    """Return a [m, n] times b [n, k], with two more roundings where the accumulator is scaled."""
    slack = (a.shape[1] + 2) * 2.0**-24 * (np.abs(a) @ np.abs(b))
    return Gemm(a @ b, slack)


def fits(got: torch.Tensor, want: Gemm) -> torch.Tensor:
    """Return, for each element, whether `got` is the once-rounded result of a float32 GEMM."""
    name = str(got.dtype).removeprefix("torch.")
    low, high = (to_dtype(bound, name) for bound in (want.exact - want.slack, want.exact + want.slack))
    found = got.detach().double().numpy().reshape(low.shape)
    return torch.as_tensor((low <= found) & (found <= high))


def operands(dtype: torch.dtype, shape: tuple[int, ...] = (TOKENS, IN)) -> tuple[torch.Tensor, ...]:
    """Return x, weight and dH: normals times 2^(row + column), both uniform over -24..24."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> torch.Tensor:
        normal = torch.randn(rows, columns, generator=generator)
        row = torch.randint(-24, 25, (rows, 1), generator=generator)
        column = torch.randint(-24, 25, (1, columns), generator=generator)
        return torch.ldexp(normal, row + column).to(dtype)

    return draw(TOKENS, IN).reshape(shape), draw(OUT, IN), draw(TOKENS, OUT).reshape(*shape[:-1], OUT)


def run(x: torch.Tensor, weight: torch.Tensor, dh: torch.Tensor, gemms: Gemms, cast: BlockCast = CAST) -> list:
    """Return h, dX and dW."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    h = mx_linear(x, weight, linear(gemms, cast))
    h.backward(dh)
    assert h.dtype == x.grad.dtype == weight.grad.dtype == x.dtype
    assert h.shape == dh.shape
    assert x.grad.shape == x.shape
    return [h, x.grad, weight.grad]


def references(
    x: torch.Tensor, weight: torch.Tensor, dh: torch.Tensor, gemms: Gemms, cast: BlockCast = CAST
) -> list[Gemm]:
    """Return H = Q(X; in) Q(W; in)^T, dX = Q(dH; out) Q(W; out), dW = Q(dH; T)^T Q(X; T)."""
    dtype = str(x.dtype).removeprefix("torch.")
    X, W, dH = (t.double().numpy().reshape(-1, t.shape[-1]) for t in (x, weight, dh))

    def q(t: Array, operand: str, axis: int) -> Array:
        fmt = gemms.format(operand)
        if fmt and getattr(gemms, operand).scale == "none":
            values, scale = tensor_cast_array(t, fmt, cast.rounding)
            return values * float(scale)
        if fmt == "NVFP4":
            rows = nvfp4_tensor_scale(np.abs(t).max(1, keepdims=True)) if operand == "forward_x" else None
            values, scales, tensor_scale = nvfp4_array(t, rows, axis)
            return values * np.repeat(scales * tensor_scale.astype(np.float64), 16, axis)
        return fake_quantize_array(t, fmt, axis, dtype, **dataclasses.asdict(cast))

    return [
        gemm(q(X, "forward_x", 1), q(W, "forward_w", 1).T),
        gemm(q(dH, "dgrad_dh", 1), q(W, "dgrad_w", 0)),
        gemm(q(dH, "wgrad_dh", 0).T, q(X, "wgrad_x", 0)),
    ]


def assert_gemms(x: torch.Tensor, weight: torch.Tensor, dh: torch.Tensor, gemms: Gemms, cast: BlockCast = CAST) -> None:
    for name, got, want in zip(
        ("H", "dX", "dW"), run(x, weight, dh, gemms, cast), references(x, weight, dh, gemms, cast), strict=True
    ):
        assert fits(got, want).all(), f"{name}: {(~fits(got, want)).sum()} of {got.numel()} elements"
