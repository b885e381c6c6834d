"""Cast one operand by any recipe with FP32 block scales: the elements, and the scales apart from them.

An element times an FP32 scale is no bf16 number, so `mxstudy.kernels.matmul_blocks` multiplies the scales into the
product of each block. The kernel is that of `cast_any`.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from mxstudy.kernels.cast_any import key_and_place, prepared
from mxstudy.kernels.cast_any import launch_cuda as launch_cast
from mxstudy.kernels.operand_cast import OperandCast, checked_cast, incomplete_axis
from mxstudy.kernels.operators import BF16, FP32
from mxstudy.kernels.packing import unpack
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.random_bits import Draws
from mxstudy.reader import require


def cast_blocks(
    x: Tensor,
    cast: OperandCast,
    *,
    mean: Tensor | None = None,
    rms: Tensor | None = None,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    signs: Tensor | None = None,
    draws: Draws | None = None,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the elements, bf16 of x's shape, and the scales, float32: x's shape with `axis` in blocks.

    Square blocks repeat their scale across the contraction axis. The arguments are those of `cast_any`.
    """
    packed = checked_cast(x, cast, gain, bias, signs)
    require(cast.scale == "FP32", f"scale: {cast.scale} scales are part of the operand; call cast_any")
    key, place = key_and_place(cast, draws)
    return _cast_blocks(x, mean, rms, gain, bias, signs, key, place, after, packed)


@library.custom_op("mxstudy::cast_blocks", mutates_args=())
def _cast_blocks(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    key: Tensor | None,
    place: Tensor | None,
    after: Tensor | None,
    packed: str,
) -> tuple[Tensor, Tensor]:
    return step_by_step(x, mean, rms, gain, bias, signs, key, place, packed=packed)


def step_by_step(x: Tensor, *given: Tensor | None, packed: str) -> tuple[Tensor, Tensor]:
    """Return what `cast_blocks` does, by the reference; `given`: the operator's tensors up to the place."""
    mean, rms, gain, bias, signs, key, place = given
    cast = unpack(OperandCast, packed)
    y = prepared(x, mean, rms, gain, bias, signs, cast)
    draws = None if key is None or place is None else Draws(key, place)
    quantized = quantize_as(y, cast.as_cast(), cast.axis, draws=draws)
    scales = quantized.block_scales_along(cast.axis % x.ndim).clone(memory_format=torch.contiguous_format)
    return quantized.values.to(BF16).contiguous(), scales


@_cast_blocks.register_fake
def _(x: Tensor, *options: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=BF16), empty_scales(x, unpack(OperandCast, options[-1]))


@_cast_blocks.register_kernel("cuda")
def launch_cuda(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    key: Tensor | None,
    place: Tensor | None,
    after: Tensor | None,
    packed: str,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel. There is none for incomplete blocks, which are filled with zeros: the reference casts them."""
    cast = unpack(OperandCast, packed)
    if incomplete_axis(x, cast) is not None:
        return step_by_step(x, mean, rms, gain, bias, signs, key, place, packed=packed)
    scales = empty_scales(x, cast)
    of_norm = x, mean, rms, gain, bias, signs
    return launch_cast(*of_norm, key, place, None, after, packed, scales=scales), scales


def empty_scales(x: Tensor, cast: OperandCast) -> Tensor:
    shape = list(x.shape)
    shape[cast.axis] = -(-shape[cast.axis] // cast.block_size)
    return x.new_empty(shape, dtype=FP32)
