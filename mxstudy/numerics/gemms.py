"""The three GEMMs of a linear layer, each operand quantised along its own contraction axis: the reference.

    forward   H  = Q(X; in)  . Q(W; in)^T
    dgrad     dX = Q(dH; out) . Q(W; out)
    wgrad     dW = Q(dH; T)^T . Q(X; T)

A block scale belongs to one axis, so X, W and dH are each quantised twice, both times from high precision unless the
recipe says otherwise. A transform rotates both operands of a GEMM along its contraction axis and cancels in the
product. Every GEMM accumulates in FP32 and rounds once; scales above the block scales are multiplied into the
accumulator. This file computes every recipe: it is the oracle for all backends, and the path on CPU.

A stack of replicas has a leading dimension, X [S, T, in] and W [S, out, in]: S independent layers side by side, which
share nothing, not even a scale. Every tensor below whose name ends in _TI or _OI may have that dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mxstudy.config.casts import Cast, Gemms, Hadamard, gemm_of
from mxstudy.numerics.cast import is_of_several, outer_scale_of, quantize_as
from mxstudy.numerics.formats import is_random
from mxstudy.numerics.gathered_weight import GatheredWeight
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.quantized import Quantized
from mxstudy.numerics.random_bits import Draws, Random, draws_of_operand, signs_of
from mxstudy.numerics.transforms import hadamard
from mxstudy.reader import require

# ------------------------------------------------------------------------------------------------------------- operands


class Bounds(NamedTuple):
    """Upper bounds of |X|, float32, 0-dim or [S, 1, 1]: under the forward's transform, and without it."""

    forward: Tensor
    plain: Tensor


# Converts a quantised matrix to the operand of a GEMM other than torch's; the dtype is that of the GEMM's result.
Decode = Callable[[Quantized, torch.dtype], Tensor]

# Casts a matrix along an axis by a kernel, to a bf16 operand with the reference's values. The last argument is never
# read. It is a tensor of the backward: without it a compiler would move the cast to the forward and keep its result.
CastKernel = Callable[[Tensor, Cast, int, Tensor | None], Tensor]


@dataclass(frozen=True)
class Operand:
    """An operand of a GEMM, and the float32 scale by which the GEMM's accumulator is multiplied (None: 1).

    `block_scales`: float32, one for every `block_size` elements of the contraction axis. They are FP32 scales. Products
    with them are not bf16 numbers, so each block is a GEMM of its own.
    """

    values: Tensor
    scale: Tensor | None = None
    block_scales: Tensor | None = None
    block_size: int = 0

    def dequantize(self) -> Tensor:
        """Return values times scales, float32, for an operand whose contraction axis is the last one."""
        values = to_dtype(self.values, torch.float32)
        if self.block_scales is not None:
            values = values * self.block_scales.repeat_interleave(self.block_size, -1)[..., : values.shape[-1]]
        return values if self.scale is None else values * self.scale

    @property
    def T(self) -> Operand:
        scale, block_scales = (None if s is None else transposed(s) for s in (self.scale, self.block_scales))
        return Operand(transposed(self.values), scale, block_scales, self.block_size)


def transposed(x: Tensor) -> Tensor:
    """Return x with its last two axes swapped. `t` below 3 axes also takes a 0-dim scale and torchao's MXTensor."""
    return x.mT if x.ndim > 2 else x.t()


def quantized_operand(
    x: Tensor, cast: Cast, axis: int, draws: Draws | None = None, bound: Tensor | None = None
) -> Quantized:
    """Quantise x [rows, columns] as an operand along `axis`, -2 or -1.

    In a stack each replica has its own tensor scale. `bound`: an upper bound of |x|, where one is known; if x is
    several tensors, that of the tensor of each block of rows, or of each row if there are no blocks: [.., 1].
    """
    x = to_dtype(x, torch.float32)
    along = -1 if cast.scale == "none" and is_of_several(bound) else axis  # without blocks all axes are the same
    return quantize_as(x, cast, along, outer_scale_of(x, cast, axis, bound), draws)


def operand(
    x: Tensor,
    cast: Cast | None,
    axis: int,
    dtype: torch.dtype,
    draws: Draws | None = None,
    bound: Tensor | None = None,
    decode: Decode | None = None,
) -> Operand:
    """Return x [rows, columns] as an operand: quantised along `axis` (-2 or -1) and decoded, or rounded to `dtype`.

    On CPU the operand is float32, because bf16 GEMMs are several times slower there; the values are the same. A
    gathered weight is quantised already.
    """
    of_gemm = gemm_dtype(x, dtype)
    if cast is None:
        return Operand(to_dtype(to_dtype(x, dtype), of_gemm))
    gathered = x if isinstance(x, GatheredWeight) else None
    if gathered is not None and decode is None:
        return Operand(gathered.decoded(axis, of_gemm))
    quantized = gathered.quantized(axis) if gathered is not None else quantized_operand(x, cast, axis, draws, bound)
    if decode is not None:
        return Operand(decode(quantized, of_gemm))
    if cast.scale == "FP32":
        block_scales = quantized.block_scales_along(axis % x.ndim)
        return Operand(to_dtype(quantized.values, of_gemm), None, block_scales, quantized.block_size)
    return Operand(quantized.without_tensor_scale().dequantize(of_gemm), quantized.tensor_scale)


def gemm_dtype(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the operands of a GEMM in `dtype` on x's device."""
    return torch.float32 if x.device.type == "cpu" else dtype


def gemm(a_MK: Operand, b_KN: Operand, dtype: torch.dtype) -> Tensor:
    """Return the product [M, N] or [S, M, N]: accumulated in FP32, scaled, rounded once to `dtype`."""
    scales = [scale for scale in (a_MK.scale, b_KN.scale) if scale is not None]
    if a_MK.block_size or b_KN.block_size:
        accumulated = gemm_by_blocks(a_MK, b_KN)
    elif not scales:
        return to_dtype(a_MK.values @ b_KN.values, dtype)
    else:
        accumulated = gemm_fp32(a_MK.values, b_KN.values)
    return to_dtype(accumulated * math.prod(scales) if scales else accumulated, dtype)


def gemm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Return the product in float32, whatever the operands' dtype."""
    product = torch.mm if a.ndim == 2 else torch.bmm
    return a @ b if a.dtype == torch.float32 else product(a, b, out_dtype=torch.float32)


def add_gemm_fp32(total_MN: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product to `total_MN`, float32, in place and in one GEMM; bf16 matrices are on a GPU."""
    if a.dtype == torch.float32:
        total_MN.addmm_(a, b)
    else:
        torch.addmm(total_MN, a, b, out_dtype=torch.float32, out=total_MN)


def gemm_by_blocks(a_MK: Operand, b_KN: Operand) -> Tensor:
    """Return the sum of one GEMM per block of the contraction axis, each scaled before the sum: float32."""
    size, accumulated = common_block_size(a_MK, b_KN), None
    for i, (a, b) in enumerate(zip(a_MK.values.split(size, -1), b_KN.values.split(size, -2), strict=True)):
        part = gemm_fp32(a, b)
        part = part if a_MK.block_scales is None else part * a_MK.block_scales[..., :, i : i + 1]
        part = part if b_KN.block_scales is None else part * b_KN.block_scales[..., i : i + 1, :]
        accumulated = part if accumulated is None else accumulated + part
    assert accumulated is not None
    return accumulated


def common_block_size(*operands: Operand) -> int:
    """Return the block size of the operands with FP32 scales. Raises ConfigError if they differ."""
    sizes = {operand.block_size for operand in operands if operand.block_size}
    require(len(sizes) == 1, f"block_size: operands with FP32 scales need equal block sizes, not {sorted(sizes)}")
    return sizes.pop()


# --------------------------------------------------------------------------------------------------- the three GEMMs


@dataclass(frozen=True)
class Linear:
    """How a linear computes: filled recipe, random numbers, and the decoder for a GEMM other than torch's.

    `kernel`: makes the operands, if their casts are all plain and GEMMs are in bf16.
    """

    gemms: Gemms
    random: Random | None = None
    decode: Decode | None = None
    kernel: CastKernel | None = None

    def operand(
        self,
        x: Tensor,
        name: str,
        axis: int,
        dtype: torch.dtype,
        bounds: Bounds | None = None,
        after: Tensor | None = None,
    ) -> Operand:
        """Return x [rows, columns] as the operand of that name, whose contraction axis is -2 or -1.

        `after`: a tensor that must exist before the operand is made. Otherwise a compiler would make it early, because
        x exists long before.
        """
        x, cast = self.rotated(x, gemm_of(name), axis), self.gemms.cast_of(name)
        is_gathered = isinstance(x, GatheredWeight)
        if self.kernel is not None and cast is not None and not is_gathered and dtype == torch.bfloat16:
            return Operand(to_dtype(self.kernel(x, cast, axis, after), gemm_dtype(x, dtype)))
        return operand(x, cast, axis, dtype, self.draws(name), self.bound(x, name, bounds), self.decode)

    def gemm(self, a_MK: Operand, b_KN: Operand, dtype: torch.dtype) -> Tensor:
        """Return the product [M, N], as the function `gemm` does; subclasses multiply in another way."""
        return gemm(a_MK, b_KN, dtype)

    def transform(self, gemm: str) -> Hadamard | None:
        """Return the transform of that GEMM (forward, dgrad or wgrad), or None."""
        return getattr(self.gemms, f"{gemm}_transform")

    def rotated(
        self,
        x: Tensor,
        gemm: str,
        axis: int,
        inverse: bool = False,
        rounds: bool = True,
        transform: Hadamard | None = None,
    ) -> Tensor:
        """Return x under that GEMM's transform, float32, with bf16 values if it `rounds`; x itself if there is none.

        A `transform` that is given takes the place of the GEMM's own, with the signs that it has in that GEMM.
        """
        transform = transform or self.transform(gemm)
        if transform is None:
            return x
        signs = signs_of(transform, f"{gemm}_transform", self.random, x.device)
        x = to_dtype(x, torch.float32)
        after = transform.signs_after
        return hadamard(x, transform.size, signs, axis=axis, signs_after=after, inverse=inverse, rounds=rounds)

    def bound(self, x: Tensor, name: str, bounds: Bounds | None) -> Tensor | None:
        """Return the upper bound of x, that operand's input under all transforms, for its outer scale, or None.

        A tile of wgrad's transform mixes elements of several tokens, whose bounds are independent, so it multiplies the
        bound by up to the root of its size.
        """
        cast = self.gemms.cast_of(name)
        if bounds is None or cast is None or cast.outer_scale != "bound":
            return None
        if name == "forward_x":
            return bounds.forward
        transform = self.transform("wgrad")
        bound = bounds.forward if cast.source == "forward" else bounds.plain
        return bound if transform is None else bound * transform.size**0.5

    def forward_cast(self, x: Tensor, name: str, bounds: Bounds | None = None) -> Quantized:
        """Quantise x as the forward quantised that operand, under the forward's transform."""
        x, cast = self.rotated(x, "forward", -1), getattr(self.gemms, name)
        return quantized_operand(x, cast, -1, self.draws(name), self.bound(x, name, bounds))

    def draws(self, name: str) -> Draws | None:
        """Return the source of that operand's random numbers, or None if its cast needs none."""
        cast = self.gemms.cast_of(name)
        return draws_of_operand(self.random, name) if cast is not None and is_random(cast) else None


def forward_gemm(
    x_TI: Tensor, weight_OI: Tensor, linear: Linear, dtype: torch.dtype, bounds: Bounds | None = None
) -> Tensor:
    """Return H. `bounds`: upper bounds of |x|, where they are known."""
    x = linear.operand(x_TI, "forward_x", -1, dtype, bounds)
    w = linear.operand(weight_OI, "forward_w", -1, dtype)
    return linear.gemm(x, w.T, dtype)


def dgrad_gemm(
    dh_TO: Tensor,
    weight_OI: Tensor,
    linear: Linear,
    x_TI: Tensor | None = None,
    forward_weight_OI: Tensor | None = None,
    bounds: Bounds | None = None,
) -> Tensor:
    """Return dX. `x_TI`, `forward_weight_OI`: as the forward quantised them, read only if the recipe needs them."""
    gemms = linear.gemms
    takes_forward = gemms.dgrad_w is not None and gemms.dgrad_w.source == "forward"
    if takes_forward:
        assert forward_weight_OI is not None
        weight_OI = linear.forward_cast(forward_weight_OI, "forward_w").dequantize()
    dh = linear.operand(dh_TO, "dgrad_dh", -1, dh_TO.dtype)
    w = linear.operand(weight_OI, "dgrad_w", -2, dh_TO.dtype, after=dh_TO)
    return through_forward(linear.gemm(dh, w, dh_TO.dtype), x_TI, "forward_x", linear, takes_forward, bounds)


def wgrad_gemm(
    dh_TO: Tensor,
    x_TI: Tensor,
    linear: Linear,
    forward_weight_OI: Tensor | None = None,
    bounds: Bounds | None = None,
) -> Tensor:
    """Return dW, for the weight as the forward quantised it. `forward_weight_OI`: that weight, read only by a mask."""
    gemms = linear.gemms
    takes_forward = gemms.wgrad_x is not None and gemms.wgrad_x.source == "forward"
    if takes_forward:
        x_TI = linear.forward_cast(x_TI, "forward_x", bounds).dequantize()
    dh = linear.operand(dh_TO, "wgrad_dh", -2, dh_TO.dtype)
    x = linear.operand(x_TI, "wgrad_x", -2, dh_TO.dtype, bounds, after=dh_TO)
    return through_forward(linear.gemm(dh.T, x, dh_TO.dtype), forward_weight_OI, "forward_w", linear, takes_forward)


def add_wgrad(total_OI: Tensor, dh_TO: Tensor, x_TI: Tensor, linear: Linear) -> None:
    """Add dW of these tokens to `total_OI`, float32, in place. Raises ConfigError for a recipe that is not empty."""
    require(linear.gemms == Gemms(), "wgrad: only a recipe without casts and transforms can be summed over chunks")
    dh = linear.operand(dh_TO, "wgrad_dh", -2, dh_TO.dtype)
    x = linear.operand(x_TI, "wgrad_x", -2, dh_TO.dtype)
    add_gemm_fp32(total_OI, dh.T.values, x.values)


def through_forward(
    gradient: Tensor, x: Tensor | None, name: str, linear: Linear, is_rotated: bool, bounds: Bounds | None = None
) -> Tensor:
    """Return the gradient of the tensor that a forward operand was made from: straight through its cast, rotated back.

    `is_rotated`: the gradient is that of x under the forward's transform. With `mask_clipped` it is 0 where x was
    clipped.
    """
    cast = linear.gemms.cast_of(name)
    masks = cast is not None and cast.mask_clipped
    dtype = gradient.dtype
    if masks:
        assert x is not None
        gradient = gradient if is_rotated else linear.rotated(gradient, "forward", -1)
        inside = linear.forward_cast(x, name, bounds).inside
        assert inside is not None
        gradient = torch.where(inside, gradient, 0.0)
    if masks or is_rotated:
        gradient = linear.rotated(gradient, "forward", -1, inverse=True)
    return to_dtype(gradient, dtype)


def mx_linear(x: Tensor, weight: Tensor, linear: Linear, dtype: torch.dtype | None = None) -> Tensor:
    """Return x [..., in] times weight [out, in] transposed: [..., out]. For a stack: [S, ..., in] and [S, out, in].

    x and weight are bf16 or fp32. `dtype`: that of unquantised operands and of every GEMM's result; x's by default.
    """
    stacked = weight.ndim - 2
    keys, places = linear.random or (None, None)
    settings = linear.gemms, linear.decode, linear.kernel, dtype or x.dtype
    h_TO = _MXLinear.apply(x.flatten(stacked, -2), weight, keys, places, *settings)
    return h_TO.unflatten(stacked, x.shape[stacked:-1])


def linear_of(
    gemms: Gemms,
    keys: Tensor | None,
    places: Tensor | None,
    decode: Decode | None = None,
    kernel: CastKernel | None = None,
) -> Linear:
    """Return the `Linear` of a filled recipe, with random numbers if it has keys and places."""
    return Linear(gemms, None if keys is None or places is None else Random(keys, places), decode, kernel)


class _MXLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Tensor,
        keys: Tensor | None,
        places: Tensor | None,
        gemms: Gemms,
        decode: Decode | None,
        kernel: CastKernel | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI, keys, places)
        ctx.settings = gemms, decode, kernel
        return forward_gemm(x_TI, weight_OI, linear_of(gemms, keys, places, decode, kernel), dtype)

    @staticmethod
    def backward(ctx: Any, dh_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, keys, places = ctx.saved_tensors
        gemms, decode, kernel = ctx.settings
        linear = linear_of(gemms, keys, places, decode, kernel)
        dx_TI = dgrad_gemm(dh_TO, weight_OI, linear, x_TI, weight_OI)
        dweight_OI = wgrad_gemm(dh_TO, x_TI, linear, weight_OI)
        return to_dtype(dx_TI, x_TI.dtype), to_dtype(dweight_OI, weight_OI.dtype), *(None,) * 6
