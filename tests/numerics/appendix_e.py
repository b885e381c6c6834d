"""Compute forward and gradients of norm, gain and linear in float64: appendix E of the MXNorm paper.

The array reference quantises the operands. Each result must lie in the interval that float32 GEMMs and reductions over
them leave, and one (bf16: at most two) roundings. LayerNorm is held to the same with its own formulas. The scales of
rows and columns are chosen so that every index of a contraction matters, and a block along the wrong axis underflows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from gemms import linear
from reference import Array, fake_quantize_array, to_dtype

from mxstudy.config import BlockCast, Gemms
from mxstudy.numerics.norm_linear import NormBounds, norm_linear, rms_estimate, rms_exact, row_mean
from mxstudy.numerics.postround import rms_post_round

TOKENS, IN, OUT = 64, 96, 160
EPS = 1e-5
BOUNDS = NormBounds(1e9, 1e9)  # bounds of |x / rms|; only NVFP4 reads them
CAST = BlockCast()
UNQUANTISED = Gemms()
OPERANDS = ["forward_x", "forward_w", "dgrad_dh", "dgrad_w", "wgrad_dh", "wgrad_x"]
NAMES = ("H", "dx", "dgain", "dW")
WITH_BIAS = (*NAMES, "dbias")
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # the relative error of one rounding

Rms = Callable[[torch.Tensor], torch.Tensor]
RMS: dict[str, Rms] = {
    "exact": lambda x: rms_exact(x, EPS),
    "p1": lambda x: rms_estimate(x, 1.0, 32, EPS),
    "p2": lambda x: rms_estimate(x, 2.0, 32, EPS),
    "postround": lambda x: rms_post_round(x, "E4M3", CAST, EPS),
}


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    gain: torch.Tensor
    weight: torch.Tensor
    dh: torch.Tensor
    bias: torch.Tensor | None = None


def inputs(dtype: torch.dtype, leading: tuple[int, ...] = (TOKENS,), spread: int = 12) -> Inputs:
    """Return normals times powers of two that cancel in the contractions over `in` and `out`.

    Gains have both signs and lie around 1.
    """
    generator = torch.Generator().manual_seed(0)

    def exponents(size: int) -> torch.Tensor:
        return torch.randint(-spread, spread + 1, (size,), generator=generator)

    def draw(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        normal = torch.randn(len(rows), len(columns), generator=generator)
        return torch.ldexp(normal, rows[:, None] + columns).to(dtype)

    token, other_token, into, out = exponents(TOKENS), exponents(TOKENS), exponents(IN), exponents(OUT)
    gain = (1 + 0.6 * torch.randn(IN, generator=generator)).to(dtype)
    x, weight, dh = draw(token // 4, into), draw(out, -into), draw(other_token, -out)
    return Inputs(x.reshape(*leading, IN), gain, weight, dh.reshape(*leading, OUT))


def run(
    given: Inputs,
    rms: Rms,
    fold_gain: bool,
    gemms: Gemms,
    cast: BlockCast = CAST,
    call: Callable = norm_linear,
    **options: bool,
) -> list[torch.Tensor]:
    """Return H, dx, dgain, dW, and dbias if there is a bias."""
    leaves = (given.x, given.gain, given.weight, *(() if given.bias is None else (given.bias,)))
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    h = call(*leaves, rms=rms, bounds=BOUNDS, fold_gain=fold_gain, linear=linear(gemms, cast), **options)
    h.backward(given.dh)
    results = [h.detach(), *(leaf.grad for leaf in leaves)]
    for result, like in zip(results, (given.dh, *leaves), strict=True):
        assert result.dtype == given.x.dtype
        assert result.shape == like.shape
    return results


def array(t: torch.Tensor) -> Array:
    return t.detach().double().numpy().reshape(-1, t.shape[-1])


def fp32(x: Array) -> Array:
    return to_dtype(x, "float32")


def normalize(x: Array, r: Array) -> Array:
    """Return x / rms rounded to float32, because operands with equal bits need equal roundings here."""
    return fp32(x / r)


def gemm(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the product and the error of a float32 GEMM."""
    return a @ b, a.shape[1] * 2.0**-24 * (np.abs(a) @ np.abs(b))


def references(
    given: Inputs, rms: Rms, fold_gain: bool, gemms: Gemms, cast: BlockCast = CAST, fold_gain_in_dgrad: bool = False
) -> list[tuple[Array, Array]]:
    """Return H, dx, dgain, dW (Eq. 11, 13, 16 to 21), each with its largest allowed error.

    With `fold_gain_in_dgrad`, dgrad reads W * gain, and dgain is the sum of the folded weight's gradient times W.
    """
    dtype = str(given.x.dtype).removeprefix("torch.")
    unit = UNIT[given.x.dtype]
    x, g, W, dH = array(given.x), array(given.gain), array(given.weight), array(given.dh)
    r = array(rms(given.x))
    xbar = normalize(x, r)

    def q(t: Array, operand: str, axis: int) -> Array:
        return fake_quantize_array(t, gemms.format(operand), axis, dtype, **dataclasses.asdict(cast))

    forward_x, forward_w = (xbar, fp32(W * g)) if fold_gain else (fp32(xbar * g), W)
    h, h_error = gemm(q(forward_x, "forward_x", 1), q(forward_w, "forward_w", 1).T)
    dz, dz_error = gemm(q(dH, "dgrad_dh", 1), q(forward_w if fold_gain_in_dgrad else W, "dgrad_w", 0))
    dw, dw_error = gemm(q(dH, "wgrad_dh", 0).T, q(forward_x, "wgrad_x", 0))
    folded, folded_error = dw * W, (dw_error + unit * np.abs(dw)) * np.abs(W) + 2.0**-24 * OUT * np.abs(dw * W)
    if fold_gain:
        dw, dw_error = dw * g, dw_error * np.abs(g) + unit * np.abs(dw * g)
    of_xbar = np.ones_like(g) if fold_gain_in_dgrad else g
    dxbar, dgain = dz * of_xbar, (folded if fold_gain_in_dgrad else xbar * dz).sum(0, keepdims=True)
    dx = dxbar / r - x * (dxbar * x).mean(-1, keepdims=True) / r**3

    dz_error += unit * np.abs(dz) + 2.0**-24 * np.abs(dz) * max(TOKENS, IN)  # rounded, and what it is reduced to
    dxbar_error = dz_error * np.abs(of_xbar)
    dgain_error = (folded_error if fold_gain_in_dgrad else dz_error * np.abs(xbar)).sum(0, keepdims=True)
    dx_error = dxbar_error / r + np.abs(x) * (dxbar_error * np.abs(x)).mean(-1, keepdims=True) / r**3
    exact, error = (h, dx, dgain, dw), (h_error, dx_error, dgain_error, dw_error)
    return [(e, d + 1.01 * unit * (np.abs(e) + d)) for e, d in zip(exact, error, strict=True)]


def layer_norm_references(given: Inputs, rms: Rms, gemms: Gemms, cast: BlockCast = CAST) -> list[tuple[Array, Array]]:
    """Return the same as `references` for LayerNorm, whose gain is not folded, with dbias if there is a bias."""
    dtype = str(given.x.dtype).removeprefix("torch.")
    unit = UNIT[given.x.dtype]
    x, g, W, dH = array(given.x), array(given.gain), array(given.weight), array(given.dh)
    b = np.zeros_like(g) if given.bias is None else array(given.bias)
    mean = array(row_mean(given.x))
    std = array(rms(given.x.float() - row_mean(given.x)))
    y = fp32(fp32(normalize(fp32(x - mean), std) * g) + b)
    xbar = (x - mean) / std

    def q(t: Array, operand: str, axis: int) -> Array:
        return fake_quantize_array(t, gemms.format(operand), axis, dtype, **dataclasses.asdict(cast))

    h, h_error = gemm(q(y, "forward_x", 1), q(W, "forward_w", 1).T)
    dy, dy_error = gemm(q(dH, "dgrad_dh", 1), q(W, "dgrad_w", 0))
    dw, dw_error = gemm(q(dH, "wgrad_dh", 0).T, q(y, "wgrad_x", 0))
    dxbar, dgain, dbias = dy * g, (xbar * dy).sum(0, keepdims=True), dy.sum(0, keepdims=True)

    def over(t: Array) -> Array:
        return t.mean(-1, keepdims=True)

    dx = (dxbar - over(dxbar) - xbar * over(dxbar * xbar)) / std

    dy_error += unit * np.abs(dy) + 2.0**-24 * np.abs(dy) * max(TOKENS, IN)
    dxbar_error, dgain_error = dy_error * np.abs(g), (dy_error * np.abs(xbar)).sum(0, keepdims=True)
    dx_error = (dxbar_error + over(dxbar_error) + np.abs(xbar) * over(dxbar_error * np.abs(xbar))) / std
    exact, error = [h, dx, dgain, dw], [h_error, dx_error, dgain_error, dw_error]
    if given.bias is not None:
        exact, error = [*exact, dbias], [*error, dy_error.sum(0, keepdims=True)]
    return [(e, d + 1.01 * unit * (np.abs(e) + d)) for e, d in zip(exact, error, strict=True)]


def fits(got: torch.Tensor, want: tuple[Array, Array]) -> Array:
    exact, error = want
    found = array(got).reshape(exact.shape)
    return np.abs(found - exact) <= error


def assert_fits(got: list[torch.Tensor], want: list[tuple[Array, Array]]) -> None:
    names = WITH_BIAS[: len(want)]
    off = {name: float((~fits(a, b)).mean()) for name, a, b in zip(names, got, want, strict=True)}
    assert off == dict.fromkeys(names, 0.0), "share of elements outside of the interval"
