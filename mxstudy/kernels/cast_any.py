"""Cast one operand by any recipe: norm, transform, blocks along an axis or square, rounding to nearest or stochastic.

    ((x - mean) / rms) * gain + bias  ->  Hadamard transform  ->  blocks, scales, rounding  ->  bf16

Scales are E8M0, or E4M3 in the order of operations of Transformer Engine's training, alone or under an FP32 scale of
the whole tensor; or there is that outer scale alone. A cast with an outer scale needs the absmax of its input, which
`absmax_any` finds in a separate pass. FP32 block scales stay apart from the elements: `mxstudy.kernels.cast_blocks`.

Any step may be missing. A thread holds in its registers what belongs together along the contraction axis, so the
butterfly and the blocks' maxima are elementwise between tensors, and nothing goes through shared memory. Four
neighbours in a row share one draw of random words.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, library

from mxstudy.kernels.cast_one import normed
from mxstudy.kernels.operand_cast import CompiledCast, Groups, OperandCast, checked_cast, compiled_cast, incomplete_axis
from mxstudy.kernels.operators import BF16, FP32, launch
from mxstudy.kernels.packing import unpack
from mxstudy.numerics.cast import largest_magnitude, outer_scale, pre_rounded, quantize_as
from mxstudy.numerics.random_bits import Draws
from mxstudy.numerics.transforms import hadamard
from mxstudy.reader import require


def cast_any(
    x: Tensor,
    cast: OperandCast,
    *,
    mean: Tensor | None = None,
    rms: Tensor | None = None,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    signs: Tensor | None = None,
    draws: Draws | None = None,
    outer: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Return the operand of x, without `numerics.cast.scale_of_result`: bf16, x's shape.

    x [rows, columns] bf16 or fp32; mean and rms float32 [rows, 1]; gain and bias [columns]; signs float32 [size] of the
    transform; `draws`: the source of the random words, with key [2]; `outer`: what `absmax_any` returns. `after` is not
    read: an argument that depends on a gradient keeps the cast in the backward. Raises ConfigError as `checked_cast`.
    """
    packed = checked_cast(x, cast, gain, bias, signs)
    require(cast.has_outer == (outer is not None), "outer: give it exactly if the cast has an outer scale")
    require(cast.scale != "FP32", "scale: FP32 scales are not multiplied into an operand; call cast_blocks")
    key, place = key_and_place(cast, draws)
    return _cast_any(x, mean, rms, gain, bias, signs, key, place, outer, after, packed)


def key_and_place(cast: OperandCast, draws: Draws | None) -> tuple[Tensor | None, Tensor | None]:
    """Return what the kernel reads of the source of random words, or None twice for a cast that needs none."""
    require(not cast.draws or draws is not None, "draws: stochastic rounding needs them; give a key and a place")
    require(draws is None or draws.key.ndim == 1, "draws: a stack's key has no kernel; give one replica's key")
    require(
        draws is None or draws.rows is None, "draws: dispatched rows have no kernel; give rows that follow each other"
    )
    return (draws.key, draws.place) if draws is not None and cast.draws else (None, None)


def absmax_any(
    x: Tensor,
    cast: OperandCast,
    *,
    mean: Tensor | None = None,
    rms: Tensor | None = None,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    signs: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Return the largest magnitude that `cast_any` casts with these arguments: float32 [], or NaN if one is NaN."""
    packed = checked_cast(x, cast, gain, bias, signs)
    require(cast.has_outer, "outer: only a cast with an outer scale needs the absmax of x")
    return _absmax_any(x, mean, rms, gain, bias, signs, after, packed)


def prepared(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    cast: OperandCast,
) -> Tensor:
    """Return what the blocks are made of, before it is pre-rounded, float32."""
    y = normed(x, mean, rms, gain, bias, cast.round_first)
    if cast.transform_size is None:
        return y
    return hadamard(y, cast.transform_size, signs, axis=cast.axis, signs_after=cast.signs_after)


# ------------------------------------------------------------------------------------------------------------ the cast


@library.custom_op("mxstudy::cast_any", mutates_args=())
def _cast_any(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    key: Tensor | None,
    place: Tensor | None,
    outer: Tensor | None,
    after: Tensor | None,
    packed: str,
) -> Tensor:
    return step_by_step(x, mean, rms, gain, bias, signs, key, place, outer, packed=packed)


def step_by_step(x: Tensor, *given: Tensor | None, packed: str) -> Tensor:
    """Return what `cast_any` does, by the reference; `given`: the operator's tensors up to the absmax."""
    mean, rms, gain, bias, signs, key, place, outer = given
    cast = unpack(OperandCast, packed)
    y = prepared(x, mean, rms, gain, bias, signs, cast)
    if cast.fmt is None:
        return y.to(BF16, copy=True).contiguous()
    draws = None if key is None or place is None else Draws(key, place)
    settings = cast.as_cast()
    quantized = quantize_as(y, settings, cast.axis, None if outer is None else outer_scale(outer, settings), draws)
    return quantized.without_tensor_scale().dequantize(BF16).contiguous()


@_cast_any.register_fake
def _(x: Tensor, *options: object) -> Tensor:
    return x.new_empty(x.shape, dtype=BF16)


@_cast_any.register_kernel("cuda")
def launch_cuda(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    key: Tensor | None,
    place: Tensor | None,
    outer: Tensor | None,
    after: Tensor | None,
    packed: str,
    groups: Groups | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Launch the kernel. `groups`: a tile other than the usual one, with whole square blocks. `scales`: FP32 ones.

    The result does not depend on the tile. If the groups of a cast without block scales do not divide the axis, the
    reference computes it.
    """
    from mxstudy.kernels.device.cast_any import cast_any_kernel

    cast = unpack(OperandCast, packed)
    if cast.fmt and incomplete_axis(x, cast) is not None:
        return step_by_step(x, mean, rms, gain, bias, signs, key, place, outer, packed=packed)
    if cast.in_two:
        first, second = cast.halves
        y = launch_cuda(x, mean, rms, gain, bias, signs, None, None, None, None, first.packed)
        return launch_cuda(y, None, None, None, None, None, key, place, outer, None, second.packed, groups, scales)
    if cast.chooses and cast.square:
        # The axis does not change a square block's result. With -2 a thread sums over rows first, like the reference.
        cast = replace(cast, axis=-2)
    result = x.new_empty(x.shape, dtype=BF16)
    launch_tiles(cast_any_kernel, (x, mean, rms, gain, bias, signs, key, place, outer, scales), result, cast, groups)
    return result


# ---------------------------------------------------------------------------------------------------------- the absmax


@library.custom_op("mxstudy::absmax_any", mutates_args=())
def _absmax_any(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    after: Tensor | None,
    packed: str,
) -> Tensor:
    return absmax_step_by_step(x, mean, rms, gain, bias, signs, packed=packed)


def absmax_step_by_step(x: Tensor, *given: Tensor | None, packed: str) -> Tensor:
    mean, rms, gain, bias, signs = given
    cast = unpack(OperandCast, packed)
    return largest_magnitude(pre_rounded(prepared(x, mean, rms, gain, bias, signs, cast), cast.as_cast()))


@_absmax_any.register_fake
def _(x: Tensor, *options: object) -> Tensor:
    return x.new_empty((), dtype=FP32)


@_absmax_any.register_kernel("cuda")
def launch_absmax(
    x: Tensor,
    mean: Tensor | None,
    rms: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    signs: Tensor | None,
    after: Tensor | None,
    packed: str,
) -> Tensor:
    """Launch the kernel, which finds the absmax of each tile, and take the largest."""
    from mxstudy.kernels.device.cast_any import absmax_any_kernel

    cast = unpack(OperandCast, packed)
    if incomplete_axis(x, cast) is not None:
        return absmax_step_by_step(x, mean, rms, gain, bias, signs, packed=packed)
    if cast.in_two:
        first, second = cast.halves
        y = launch_cuda(x, mean, rms, gain, bias, signs, None, None, None, None, first.packed)
        return launch_absmax(y, None, None, None, None, None, None, second.packed)
    of_tiles = x.new_empty(tiles_of(x, cast, compiled_cast(cast, x.shape[1])), dtype=torch.int32)
    launch_tiles(absmax_any_kernel, (x, mean, rms, gain, bias, signs), of_tiles, cast)
    return of_tiles.amax().view(FP32)


# ---------------------------------------------------------------------------------------------------------- the launch


def launch_tiles(
    kernel: Any, tensors: tuple[Tensor | None, ...], result: Tensor, cast: OperandCast, groups: Groups | None = None
) -> None:
    """Launch a program of the kernel for each tile of the first tensor."""
    x = tensors[0]
    assert x is not None
    known = compiled_cast(cast, x.shape[1], groups)
    arguments = (*(None if t is None else t.contiguous() for t in tensors), result, x.shape[0])
    launch(kernel, (tiles_of(x, cast, known),), arguments, known.groups.warps, CAST=known)


def tiles_of(x: Tensor, cast: OperandCast, known: CompiledCast) -> int:
    """Return the number of tiles of x."""
    high, wide = (1, cast.group) if cast.axis == -1 else (cast.group, 1)
    return -(-x.shape[0] // (high * known.groups.rows)) * -(-x.shape[1] // (wide * known.groups.columns))
