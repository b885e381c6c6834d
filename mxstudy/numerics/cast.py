"""The cast: quantise blocks along an axis to small floats that share one scale.

    range a of a block -> its scale -> x / scale, clamped to max -> nearest element value

`quantize_as` computes every `Cast` that can be configured, and is the reference for all backends. The bits are the
same on every device, eager or compiled. Overflow is clamped here because torch's float8 casts do not saturate before
torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mxstudy.config.casts import BlockCast, Cast
from mxstudy.numerics.formats import CODE_BUMP, FORMATS, SCALE_RULES, ElementFormat, is_random, look_up
from mxstudy.numerics.grid import encode, round_to_bf16_away, round_to_grid, to_dtype
from mxstudy.numerics.quantized import Quantized
from mxstudy.numerics.random_bits import Draws, thresholds
from mxstudy.numerics.scales import (
    E4M3,
    FP32_MAX,
    absmax_bits,
    code_bump,
    divide_by_scales,
    e4m3_block_scales,
    e4m3_outer_scale,
    e4m3_training_scales,
    fill_scale,
    pairwise_sum,
    scale_codes,
)
from mxstudy.numerics.tiles import Tiles
from mxstudy.reader import ConfigError, require

QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)
STD_RANGE = 2.92247856  # E2M1's largest element in standard deviations, with the least error on Gaussians (Quartet)


def quantize(
    x: Tensor,
    fmt: str,
    block_size: int | None = None,
    axis: int = -1,
    scale_rule: str = "rceil",
    rounding: str = "even",
    tensor_scale: Tensor | float | None = None,
) -> Quantized:
    """Quantise x (bf16, fp16 or fp32, any shape) in blocks of `block_size` (32; NVFP4: 16) along `axis`.

    MX: a block with a NaN or an infinity gets the scale code 0xFF and decodes to NaN; a zero block has k = -127.
    NVFP4: `tensor_scale` is computed from x's absmax if not given; a given one is broadcast over the block scales.
    Raises ConfigError for an unknown format, rule or rounding, another dtype, a block size that does not divide the
    axis, or a tensor scale given as a number that is not positive and finite.
    """
    block_size = block_size_of(fmt, block_size)
    look_up(SCALE_RULES, scale_rule, "scale_rule")
    return block_cast(x, fmt, axis, BlockCast(block_size, scale_rule, rounding), tensor_scale)


def block_size_of(fmt: str, block_size: int | None) -> int:
    """Return `block_size`, or the format's own if it is None. Raises ConfigError for one below 1."""
    block_size = look_up(FORMATS, fmt, "format").block_size if block_size is None else block_size
    if block_size < 1:
        raise ConfigError(f"block_size: {block_size} is not a block size; give at least 1")
    return block_size


def fake_quantize(
    x: Tensor,
    fmt: str,
    block_size: int | None = None,
    axis: int = -1,
    scale_rule: str = "rceil",
    rounding: str = "even",
    tensor_scale: Tensor | float | None = None,
) -> Tensor:
    """Quantise as `quantize` does and decode: return a tensor of x's dtype and shape.

    The gradient is the straight-through estimator's: that of x is that of the result.
    """
    values = quantize(x.detach(), fmt, block_size, axis, scale_rule, rounding, tensor_scale).dequantize(x.dtype)
    return StraightThrough.apply(x, values) if x.requires_grad else values


class StraightThrough(torch.autograd.Function):
    """The values of another tensor, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def block_cast(
    x: Tensor, fmt: str, axis: int, settings: BlockCast, tensor_scale: Tensor | float | None = None
) -> Quantized:
    """Quantise x along `axis` to `fmt`, with everything else from the run's settings.

    With the rule CODE_BUMP, which only E4M3 has, each element has its own scale: the result's block size is 1.
    """
    if look_up(FORMATS, fmt, "format").scale == "E8M0":
        require(tensor_scale is None, f"tensor_scale: {fmt} has none, only NVFP4 has one; leave it out")
        cast = Cast(format=fmt)
    else:
        check_nvfp4(settings)
        cast = Cast(format=fmt, scale="E4M3", outer_scale="tensor")
    return quantize_as(x, cast.filled(settings), axis, tensor_scale)


def quantize_as(
    x: Tensor, cast: Cast, axis: int, outer: Tensor | float | None = None, draws: Draws | None = None
) -> Quantized:
    """Quantise x (bf16, fp16 or fp32) along `axis` by a cast whose open fields are filled.

    `outer`: what `outer_scale` returns, float32, broadcast over the block scales; computed from all of x if not given.
    `draws`: the source of random numbers for stochastic rounding; x is then [rows, columns] or [S, rows, columns].
    Raises ConfigError for an unknown name, another dtype, or a block size that does not divide the axis.
    """
    element = look_up(FORMATS, cast.format, "format")
    require(x.dtype in QUANTIZABLE, f"dtype: {x.dtype} cannot be quantised; give float32, bfloat16 or float16")
    require(-x.ndim <= axis < x.ndim, f"axis: {axis} is not an axis of shape {list(x.shape)}")
    check_format(cast, element)
    axis %= x.ndim
    x = pre_rounded(to_dtype(x, torch.float32), cast)
    tiles = Tiles(x.shape, axis, cast.block_size or max(1, x.shape[axis]), cast.two_dimensional)
    blocks = tiles.split(x, bool(cast.pad))
    if cast.outer_scale == "none":
        outer = None
    else:
        outer = outer_scale(largest_magnitude(x), cast) if outer is None else as_scale(outer, x)
    u = None
    if is_random(cast):
        require(draws is not None, f"rounding: {cast.rounding} is for linears, which have a seed; take even or away")
        assert draws is not None
        rows, columns = x.shape[-2:]
        u = tiles.split(thresholds(draws, rows, columns, cast.random_bits), bool(cast.pad))
    first, *others = (candidate(blocks, tiles, cast, element, outer, u, factor) for factor in cast.candidates)
    for other in others:
        first = better(first, other, x, tiles, cast)
    return first


# -------------------------------------------------------------------------------------------- the steps of a cast


def candidate(
    blocks: Tensor,
    tiles: Tiles,
    cast: Cast,
    element: ElementFormat,
    outer: Tensor | None,
    u: Tensor | None,
    factor: float,
) -> Quantized:
    """Quantise the blocks with scales that follow from `factor` times their range."""
    a = STATISTICS[cast.statistic](blocks, tiles, element, cast)
    spread = None if outer is None else tiles.spread(outer.expand(tiles.scales_shape))
    codes, scaled = SCALES[cast.scale](blocks, a if factor == 1 else a * factor, spread, cast, tiles)
    values = tiles.join(round_to_grid(scaled, element, str(cast.rounding), u))
    inside = tiles.join(scaled.abs() <= element.max) if cast.mask_clipped else None
    outer = scale_of_result(outer, cast, blocks.device)
    if cast.scale_rule == CODE_BUMP:  # each element has its own scale
        return Quantized(values, tiles.join(codes), element, tiles.axis, 1, outer, inside=inside)
    scales = tiles.squeeze(codes)
    return Quantized(values, scales, element, tiles.axis, tiles.block_size, outer, tiles.two_dimensional, inside)


def absmax(blocks: Tensor, tiles: Tiles, element: ElementFormat, cast: Cast) -> Tensor:
    """Return the absmax of each block, float32, with axes of 1 inside the blocks, or NaN if a number in it is NaN."""
    return absmax_bits(blocks, tiles.inner).view(torch.float32)


def standard_deviation(blocks: Tensor, tiles: Tiles, element: ElementFormat, cast: Cast) -> Tensor:
    """Return each block's range, chosen so that its scale is STD_RANGE * std / the largest element + 1e-8.

    A scale is its range divided by 2^emax (E8M0, rule floor) or by the largest element (other scales), so the range is
    multiplied by that. Where the deviation is not finite it is NaN, with the same sign bit on every device.
    """
    reach = 2.0**element.emax if cast.scale == "E8M0" else element.max
    count = tiles.block_size ** len(tiles.inner)
    mean, square = (pairwise_sum(x, tiles.inner) * (1 / count) for x in (blocks, blocks.square()))
    variance = (square - mean.square()).clamp_min(0)
    std = to_dtype(to_dtype(variance, torch.float64).sqrt(), torch.float32)  # float32 roots differ between processors
    return torch.where(square < torch.inf, (STD_RANGE / element.max * std + 1e-8) * reach, torch.nan)


# Statistics: each returns the range of every block (float32), from which the scale follows.
STATISTICS: dict[str, Callable[[Tensor, Tiles, ElementFormat, Cast], Tensor]] = {
    "absmax": absmax,
    "std": standard_deviation,
}


def e8m0(blocks: Tensor, a: Tensor, outer: Tensor | None, cast: Cast, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return E8M0 codes (uint8) and x over its scales.

    A power of two cannot include the headroom, so elements are multiplied by it (`scale_of_result` divides by it).
    """
    element, bits = FORMATS[cast.format], a.view(torch.int32)
    if cast.scale_rule == CODE_BUMP:
        codes = scale_codes(bits, element, "floor", code_bump(blocks, tiles.axis))
    else:
        codes = scale_codes(bits, element, str(cast.scale_rule))
    scaled = divide_by_scales(blocks, codes)
    return codes.to(torch.uint8), scaled if cast.headroom == 1 else scaled * cast.headroom


def e4m3(blocks: Tensor, a: Tensor, outer: Tensor | None, cast: Cast, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return E4M3 scales and x over its scales, computed with the reciprocal, as in NVIDIA's kernels and torchao."""
    if cast.chain == "training":
        # without an outer scale S is 1
        outer = torch.full_like(a, reach_of(cast) * cast.largest_scale) if outer is None else outer
        scales, reciprocal = e4m3_training_scales(a, outer, reach_of(cast), cast.largest_scale)
    else:
        outer = torch.ones_like(a) if outer is None else outer
        scales = e4m3_block_scales(a, outer, reach_of(cast))
        reciprocal = torch.ones_like(outer) / outer / scales  # 1 / x compiles to an approximation
    return encode(scales, E4M3).view(torch.float8_e4m3fn), blocks * reciprocal


def fp32(blocks: Tensor, a: Tensor, outer: Tensor | None, cast: Cast, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return FP32 scales and x over its scales."""
    scale = fill_scale(a, reach_of(cast))
    return scale, blocks / scale


def outer_alone(blocks: Tensor, a: Tensor, outer: Tensor | None, cast: Cast, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return block scales of 1 and x over its outer scale."""
    assert outer is not None
    return torch.ones_like(outer), blocks / outer


# Each takes blocks, their ranges and the outer scale, and returns the block scales' codes, and x over its scale.
SCALES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "E8M0": e8m0,
    "E4M3": e4m3,
    "FP32": fp32,
    "none": outer_alone,
}


def better(one: Quantized, other: Quantized, x: Tensor, tiles: Tiles, cast: Cast) -> Quantized:
    """Return, block by block, the candidate with the smaller error; the first where errors are equal."""
    errors = []
    for quantized in (one, other):
        error = tiles.split(quantized.dequantize() - x, bool(cast.pad))
        errors.append(pairwise_sum(error.square() if cast.candidate_error == "mse" else error.abs(), tiles.inner))
    takes_other = (errors[1] < errors[0]) | errors[0].isnan()  # NaN: the range times its factor overflowed
    everywhere = tiles.join(takes_other.expand(tiles.split(x, bool(cast.pad)).shape))
    codes = [q.scales.view(torch.uint8) if q.scales.itemsize == 1 else q.scales for q in (other, one)]
    scales = torch.where(tiles.squeeze(takes_other), codes[0], codes[1]).view(one.scales.dtype)
    values = torch.where(everywhere, other.values, one.values)
    inside = None
    if one.inside is not None and other.inside is not None:
        inside = torch.where(everywhere, other.inside, one.inside)
    return replace(one, values=values, scales=scales, inside=inside)


def outer_scale_of(x: Tensor, cast: Cast, axis: int, bound: Tensor | None) -> Tensor | None:
    """Return the outer scale of x (float32) in the cast's scope, or None if it has none."""
    if cast.outer_scale == "none":
        return None
    if bound is not None and (cast.outer_scale == "bound" or is_of_several(bound)):
        return outer_scale(bound, cast)
    of_tensor = (-2, -1) if x.ndim == 3 else None
    axes = of_tensor if cast.outer_scale == "tensor" else (axis,)
    return outer_scale(largest_magnitude(pre_rounded(x, cast), axes), cast)


def is_of_several(bound: Tensor | None) -> bool:
    """Return whether the bound is one for each of several tensors, as of experts: [.., 1], not 0-dim or [S, 1, 1]."""
    return bound is not None and bound.ndim == 2


def largest_magnitude(x: Tensor, axes: tuple[int, ...] | None = None) -> Tensor:
    """Return the largest |x| (float32), NaN if one is NaN: along `axes` (kept as 1), or 0-dim over all of x."""
    if axes is None:
        x = x.flatten() if x.numel() else x.new_zeros(1)
        return absmax_bits(x, 0).view(torch.float32).squeeze(0)
    return absmax_bits(x, axes).view(torch.float32)


def outer_scale(largest: Tensor, cast: Cast) -> Tensor:
    """Return the outer scale of a tensor with absmax `largest`, float32; for the training chain `largest` itself.

    That chain computes two factors from the absmax.
    """
    if cast.chain == "training":
        return largest
    if cast.scale == "E4M3":
        return e4m3_outer_scale(largest, reach_of(cast), cast.largest_scale)
    return fill_scale(largest, reach_of(cast))


def scale_of_result(outer: Tensor | None, cast: Cast, device: torch.device) -> Tensor | None:
    """Return the factor of a GEMM's result for this operand, a float32 scale, or None for no factor.

    `outer`: what `outer_scale` returned, or None. E8M0 scales have no outer scale; their factor undoes the headroom.
    """
    if cast.scale == "E8M0" and cast.headroom < 1:
        return torch.full((), 1 / cast.headroom, dtype=torch.float32, device=device)
    if outer is None or cast.chain == "inference":
        return outer
    return fill_scale(outer, reach_of(cast) * cast.largest_scale, 0.0)


def reach_of(cast: Cast) -> float:
    """Return the magnitude to which a block's largest element is scaled."""
    return FORMATS[cast.format].max * cast.headroom


def as_scale(scale: Tensor | float, x: Tensor) -> Tensor:
    """Return the scale as a float32 tensor on x's device. Raises ConfigError for an unusable number."""
    if not isinstance(scale, Tensor):
        check_tensor_scale(scale)
    return torch.as_tensor(scale, dtype=torch.float32, device=x.device)


def pre_rounded(x: Tensor, cast: Cast | BlockCast) -> Tensor:
    """Return x [...] float32, rounded to bf16 values (ties away) if the cast pre-rounds.

    Block scales, and the counts of overflowing elements, are computed from the result.
    """
    rounds = cast.pre_round if isinstance(cast, Cast) else cast.operand_pre_round
    return round_to_bf16_away(x) if rounds else x


def check_format(cast: Cast, element: ElementFormat) -> None:
    """Raise ConfigError for open fields, a scale or scale rule that the format lacks, or unused random bits."""
    open_fields = [name for name in ("block_size", "pad", "scale_rule", "rounding", "pre_round") if cast.has(name)]
    missing = next((name for name in open_fields if getattr(cast, name) is None), None)
    require(missing is None, f"{missing}: is not set; fill the cast with the run's settings first")
    require(
        element.scale == "E8M0" or cast.scale == element.scale,
        f"scale: {cast.format} has {element.scale} scales, not {cast.scale}; set it to {element.scale}, with an "
        f"outer_scale and blocks of {element.block_size}, or take format E2M1 for other scales",
    )
    require(
        is_random(cast) or cast.random_bits == Cast.random_bits,
        f"random_bits: {cast.rounding} rounding draws none; leave it out",
    )
    if cast.scale_rule == CODE_BUMP:
        check_code_bump(cast)
    elif cast.scale == "E8M0":
        look_up(SCALE_RULES, str(cast.scale_rule), "scale_rule")
    if cast.format == "NVFP4":
        check_nvfp4(BlockCast(cast.block_size or 0, pad_blocks=bool(cast.pad)))


def check_code_bump(cast: Cast) -> None:
    """Raise ConfigError for a cast that the public code's rule, CODE_BUMP, does not scale."""
    require(
        cast.format == E4M3.name and not cast.two_dimensional,
        f"scale_rule: {CODE_BUMP} is for E4M3 in blocks along one axis, not this {cast.format} cast; take rceil",
    )
    require(
        len(cast.candidates) == 1,
        f"candidates: cannot be used with {CODE_BUMP}, whose scales are per element; leave them out",
    )


def check_nvfp4(cast: BlockCast) -> None:
    """Raise ConfigError for settings that NVFP4 does not support."""
    if cast.block_size != FORMATS["NVFP4"].block_size:
        raise ConfigError(f"block_size: NVFP4 has blocks of 16, not {cast.block_size}; set it to 16")
    if cast.pad_blocks:
        raise ConfigError("pad_blocks: NVFP4 needs complete blocks; set it to false")
    if cast.scale_rule != BlockCast.scale_rule:
        raise ConfigError(
            f"scale_rule: {cast.scale_rule} is for E8M0 scales, and NVFP4's are E4M3, rounded to nearest; leave it out"
        )


def check_tensor_scale(scale: float) -> None:
    """Raise ConfigError for a number that is not positive, or that float32 cannot hold."""
    if not 2.0**-149 <= scale <= FP32_MAX:
        raise ConfigError(f"tensor_scale: {scale}; give a number that is positive and finite in float32")
