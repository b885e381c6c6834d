"""Compute the three GEMMs of any recipe, with operands by reference_casts.py and products in float64.

    forward   H  = Q(X F; in)   . Q(W F; in)^T
    dgrad     dX = Q(dH D; out) . Q(W^T D; out)^T
    wgrad     dW = Q(dH^T G; T) . Q(X^T G; T)^T

F, D and G are the transforms: diag(signs) H, or H diag(signs), of each tile of the contraction axis. An operand that
the backward takes from the forward is decode(Q(W F)), so its product is a gradient with respect to W F, or to X F. Such
a gradient goes back through F^T, and so does one that is masked where the forward clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from reference import Array, to_dtype
from reference_casts import Draws, Outcome, cast_array, outer_scale, signs_drawn

from mxstudy.config.casts import Cast, Gemms, Hadamard

Float32s = NDArray[np.float32]
ROUNDINGS = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # the relative error of one rounding


class Product(NamedTuple):
    """A product in float64, and how much the arithmetic of the linear may differ from it."""

    exact: Array
    slack: Array


@dataclass(frozen=True)
class Reference:
    """A linear of that name and seed, at a step and place in the training, with the `bound` of X if it is known."""

    gemms: Gemms
    seed: int = 0
    name: str = "linear"
    step: int = 0
    first_row: int = 0
    dtype: str = "float32"
    bound: float | None = None

    # --------------------------------------------------------------------------------------------------- operands

    def transform(self, gemm: str) -> Hadamard | None:
        return getattr(self.gemms, f"{gemm}_transform")

    def signs(self, gemm: str) -> Array | None:
        transform = self.transform(gemm)
        assert transform is not None
        if transform.vector:
            return np.array(transform.vector, np.float64)
        if transform.signs == "none":
            return None
        step, row = {"seed": (0, 0), "step": (self.step, 0), "call": (self.step, self.first_row)}[transform.signs]
        return signs_drawn(Draws(self.seed, f"{self.name}.{gemm}_transform", step, row), transform.size)

    def rotated(self, x: Float32s, gemm: str, axis: int) -> Float32s:
        """Return the result of a float32 butterfly with growing strides, times size^-1/2, rounded to bfloat16."""
        transform = self.transform(gemm)
        if transform is None:
            return x
        size, signs = transform.size, self.signs(gemm)
        before, after = (None, signs) if transform.signs_after else (signs, None)
        tiles = np.moveaxis(x, axis, -1).reshape(-1, size).astype(np.float32)
        tiles = tiles if before is None else tiles * before.astype(np.float32)
        stride = 1
        while stride < size:
            below = np.arange(size) // stride % 2 == 0
            a, b = tiles[:, below], tiles[:, ~below]
            tiles = np.empty_like(tiles)
            tiles[:, below], tiles[:, ~below] = a + b, a - b
            stride *= 2
        tiles = to_dtype((tiles * np.float32(size**-0.5)).astype(np.float64), "bfloat16")
        tiles = tiles if after is None else tiles * after
        there = np.moveaxis(x, axis, -1).shape
        return np.moveaxis(tiles.reshape(there), -1, axis).astype(np.float32)

    def quantized(self, x: Float32s, operand: str, axis: int) -> Outcome:
        """Return x under its GEMM's transform, cast along the contraction axis."""
        gemm, cast = operand.partition("_")[0], getattr(self.gemms, operand)
        row = 0 if operand.endswith("_w") else self.first_row
        draws = Draws(self.seed, f"{self.name}.{operand}", self.step, row) if cast.rounding == "stochastic" else None
        x, bound = self.rotated(x, gemm, axis), self.bound if operand.endswith("_x") else None
        for transform in (self.transform(rotated) for rotated in {gemm, *(["forward"] * (cast.source == "forward"))}):
            if bound is not None and transform:
                bound *= math.sqrt(transform.size)
        return cast_array(x, cast, axis, outer_scale(x, cast, axis, bound), draws)

    def operand(self, x: Float32s, operand: str, axis: int) -> Array:
        """Return what the GEMM multiplies, scales included, in float64."""
        cast: Cast | None = getattr(self.gemms, operand)
        if cast is None:
            return to_dtype(self.rotated(x, operand.partition("_")[0], axis).astype(np.float64), self.dtype)
        got = self.quantized(x, operand, axis)
        scales = np.ldexp(1.0, got.scales.astype(int) - 127) if cast.scale == "E8M0" else got.scales
        scales = scales * (1.0 if got.outer is None else got.outer)
        along = (0, 1) if cast.two_dimensional else (axis,)
        for i in along:
            scales = np.repeat(scales, cast.block_size or x.shape[i], i).take(range(x.shape[i]), i)
        return got.values * scales

    # -------------------------------------------------------------------------------------------------- the GEMMs

    def forward(self, x: Float32s, w: Float32s) -> Product:
        return self.product(self.operand(x, "forward_x", 1), self.operand(w, "forward_w", 1).T)

    def dgrad(self, dh: Float32s, w: Float32s, x: Float32s) -> Product:
        takes = self.gemms.dgrad_w is not None and self.gemms.dgrad_w.source == "forward"
        w = self.quantized(w, "forward_w", 1).decoded.astype(np.float32) if takes else w
        product = self.product(self.operand(dh, "dgrad_dh", 1), self.operand(w, "dgrad_w", 0))
        return self.through_forward(product, x, "forward_x", takes)

    def wgrad(self, dh: Float32s, x: Float32s, w: Float32s) -> Product:
        takes = self.gemms.wgrad_x is not None and self.gemms.wgrad_x.source == "forward"
        x = self.quantized(x, "forward_x", 1).decoded.astype(np.float32) if takes else x
        product = self.product(self.operand(dh, "wgrad_dh", 0).T, self.operand(x, "wgrad_x", 0))
        return self.through_forward(product, w, "forward_w", takes)

    def product(self, a: Array, b: Array) -> Product:
        """Return the product a b and its largest error.

        That is n * 2^-24 of the sum of magnitudes, four more such units for scales, and one rounding to the dtype.
        """
        slack = (a.shape[1] + 4) * 2.0**-24 * (np.abs(a) @ np.abs(b))
        return self.rounded(Product(a @ b, slack), ROUNDINGS[self.dtype])

    def rounded(self, product: Product, relative: float) -> Product:
        return Product(product.exact, product.slack + (np.abs(product.exact) + product.slack) * relative)

    def through_forward(self, product: Product, x: Float32s, operand: str, is_rotated: bool) -> Product:
        cast: Cast | None = getattr(self.gemms, operand)
        masks = cast is not None and cast.mask_clipped
        if masks:
            product = product if is_rotated else self.by_matrix(product, inverse=False)
            inside = self.quantized(x, operand, 1).inside
            product = Product(product.exact * inside, product.slack * inside)
        return self.by_matrix(product, inverse=True) if masks or is_rotated else product

    def by_matrix(self, product: Product, inverse: bool) -> Product:
        """Return the rows times F or F^T, in float64, by Sylvester's matrix, with one rounding to bfloat16."""
        transform = self.transform("forward")
        if transform is None:
            return product
        size, signs = transform.size, self.signs("forward")
        bits = np.arange(size)
        parity = np.vectorize(lambda n: bin(n).count("1") % 2)(bits[:, None] & bits[None])
        matrix = (1.0 - 2.0 * parity) / math.sqrt(size)
        if signs is not None:
            matrix = matrix * (signs[None] if transform.signs_after else signs[:, None])
        matrix = matrix.T if inverse else matrix
        exact, slack = (part.reshape(-1, size) for part in product)
        slack = slack @ np.abs(matrix) + size * 2.0**-24 * (np.abs(exact) @ np.abs(matrix))
        turned = Product((exact @ matrix).reshape(product.exact.shape), slack.reshape(product.slack.shape))
        return self.rounded(self.rounded(turned, ROUNDINGS["bfloat16"]), ROUNDINGS[self.dtype])


def assert_within(got: torch.Tensor, want: Product, what: str) -> None:
    differs = np.abs(got.detach().double().numpy() - want.exact) - want.slack
    assert (differs <= 0).all(), f"{what}: {(differs > 0).sum()} of {differs.size} elements, by up to {differs.max()}"
