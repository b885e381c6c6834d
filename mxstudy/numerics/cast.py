"""The cast: blocks of an axis to small floats that share one scale.

    range a of a block -> its scale -> x over the scale, clamped to max -> nearest element value

A `Cast` says how, in all of its fields. This file computes every one of them, and is what backends are compared with.
Bits are the same on every device, eager or compiled; overflow is clamped here because float8 casts of torch before
2.13 do not saturate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mxstudy.config.casts import BlockCast, Cast
from mxstudy.numerics.formats import CODE_BUMP, FORMATS, ROUNDINGS, SCALE_RULES, ElementFormat, is_random, look_up
from mxstudy.numerics.grid import encode, round_to_bf16_away, round_to_grid, to_dtype
from mxstudy.numerics.quantized import CODE_DTYPES as CODE_DTYPES
from mxstudy.numerics.quantized import Quantized as Quantized
from mxstudy.numerics.random_bits import Draws, uniform
from mxstudy.numerics.scales import (
    absmax_bits,
    code_bump,
    divide_by_scales,
    e4m3_block_scales,
    fill_scale,
    pairwise_sum,
    scale_above_e4m3,
    scale_codes,
)
from mxstudy.numerics.tiles import Tiles
from mxstudy.numerics.tiles import join_blocks as join_blocks
from mxstudy.numerics.tiles import split_blocks as split_blocks
from mxstudy.reader import ConfigError, require

E4M3 = FORMATS["E4M3"]
QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)
STD_RANGE = 2.92247856  # standard deviations that E2M1's range covers with the least error, of Gaussians (Quartet)


def quantize(
    x: Tensor,
    fmt: str,
    block_size: int | None = None,
    axis: int = -1,
    scale_rule: str = "rceil",
    rounding: str = "even",
    tensor_scale: Tensor | float | None = None,
) -> Quantized:
    """x (bf16, fp16 or fp32, any shape) in blocks of `block_size` (32; NVFP4: 16) along `axis`.

    MX: a block with a NaN or an infinity has the scale code 0xFF and decodes to NaN; a zero block has k = -127.
    NVFP4: `tensor_scale` is that of x's absmax if not given; one that is given broadcasts over the scales.
    Raises ConfigError for an unknown format, rule or rounding, another dtype, an axis that does not divide, or a tensor
    scale that is a number, but not positive and finite.
    """
    block_size = block_size_of(fmt, block_size)
    look_up(SCALE_RULES, scale_rule, "scale_rule")
    return block_cast(x, fmt, axis, BlockCast(block_size, scale_rule, rounding), tensor_scale)


def block_size_of(fmt: str, block_size: int | None) -> int:
    """The format's own if none is given; ConfigError for one that is not positive."""
    block_size = look_up(FORMATS, fmt, "format").block_size if block_size is None else block_size
    if block_size < 1:
        raise ConfigError(f"block_size: {block_size} numbers are no block; give at least 1")
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
    """`quantize` and decode in one: x's dtype and shape."""
    return quantize(x, fmt, block_size, axis, scale_rule, rounding, tensor_scale).dequantize(x.dtype)


def block_cast(
    x: Tensor, fmt: str, axis: int, settings: BlockCast, tensor_scale: Tensor | float | None = None
) -> Quantized:
    """Quantise x as an operand of that format whose recipe leaves everything to the settings.

    With CODE_BUMP as the rule, which E4M3 alone has, each element has a scale: the result's block size is 1.
    """
    element = look_up(FORMATS, fmt, "format")
    outer = "none" if element.scale == "E8M0" else "tensor"
    check_nvfp4(fmt, settings)
    if element.scale == "E8M0" and tensor_scale is not None:
        raise ConfigError(f"tensor_scale: {fmt} has none; NVFP4 has")
    settings = settings if element.scale == "E8M0" else replace(settings, scale_rule="rceil")
    cast = Cast(format=fmt, scale=element.scale, outer_scale=outer).filled(settings)  # type: ignore[arg-type]
    return quantize_as(x, cast, axis, tensor_scale)


def quantize_as(
    x: Tensor, cast: Cast, axis: int, outer: Tensor | float | None = None, draws: Draws | None = None
) -> Quantized:
    """Quantise x (bf16, fp16 or fp32) along `axis` by a cast that is filled.

    `outer`: the scale above the block scales, float32, which broadcasts over them; that of all of x if not given.
    `draws`: where stochastic rounding takes its numbers from; x is then [rows, columns] or a stack of that. Raises
    ConfigError for what cannot be: an unknown name, another dtype, an axis that does not divide.
    """
    element = look_up(FORMATS, cast.format, "format")
    require(x.dtype in QUANTIZABLE, f"dtype: {x.dtype} cannot be quantised; give float32, bfloat16 or float16")
    require(-x.ndim <= axis < x.ndim, f"axis: {axis} is not one of shape {list(x.shape)}")
    check_format(cast, element)
    axis %= x.ndim
    x = pre_rounded(to_dtype(x, torch.float32), cast)
    tiles = Tiles(x.shape, axis, cast.block_size or max(1, x.shape[axis]), cast.two_dimensional)
    blocks = tiles.split(x, bool(cast.pad))
    above, u = None, None
    if cast.outer_scale != "none":
        above = outer_scale(x, cast) if outer is None else as_scale(outer, x)
    if look_up(ROUNDINGS, str(cast.rounding), "rounding").draws:
        require(draws is not None, f"rounding: {cast.rounding} takes random numbers; give quantize_as its draws")
        assert draws is not None
        rows, columns = x.shape[-2:]
        u = tiles.split(uniform(draws, rows, columns, cast.random_bits), bool(cast.pad))
    first, *others = (candidate(blocks, tiles, cast, element, above, u, factor) for factor in cast.candidates)
    for other in others:
        first = better(first, other, x, tiles, cast)
    return first


# ---------------------------------------------------------------------------------------------- a cast, part after part


def candidate(
    blocks: Tensor,
    tiles: Tiles,
    cast: Cast,
    element: ElementFormat,
    above: Tensor | None,
    u: Tensor | None,
    factor: float,
) -> Quantized:
    """Blocks quantised under scales that are made from `factor` times their range."""
    a = STATISTICS[cast.statistic](blocks, tiles, element, cast)
    spread = None if above is None else tiles.spread(above.expand(tiles.scales_shape))
    codes, scaled = SCALES[cast.scale](blocks, a if factor == 1 else a * factor, spread, cast, tiles)
    values = tiles.join(round_to_grid(scaled, element, str(cast.rounding), u))
    inside = tiles.join(scaled.abs() <= element.max) if cast.mask_clipped else None
    if cast.scale == "E8M0" and cast.headroom < 1:
        above = torch.full((), 1 / cast.headroom, dtype=torch.float32, device=blocks.device)
    if cast.scale_rule == CODE_BUMP:  # a scale an element
        return Quantized(values, tiles.join(codes), element, tiles.axis, 1, above, inside=inside)
    scales = tiles.squeeze(codes)
    return Quantized(values, scales, element, tiles.axis, tiles.block_size, above, tiles.two_dimensional, inside)


def absmax(blocks: Tensor, tiles: Tiles, element: ElementFormat, cast: Cast) -> Tensor:
    return absmax_bits(blocks, tiles.inner).view(torch.float32)


def standard_deviation(blocks: Tensor, tiles: Tiles, element: ElementFormat, cast: Cast) -> Tensor:
    """STD_RANGE standard deviations over the largest element make the scale, times what a scale is the quotient by.

    That is 2^emax of E8M0 scales, under rule floor, and the largest element of others. NaN where the deviation is not
    finite, with a sign bit that is the same on every device.
    """
    reach = 2.0**element.emax if cast.scale == "E8M0" else element.max
    count = tiles.block_size ** len(tiles.inner)
    mean, square = (pairwise_sum(x, tiles.inner) * (1 / count) for x in (blocks, blocks.square()))
    variance = (square - mean.square()).clamp_min(0)
    std = to_dtype(to_dtype(variance, torch.float64).sqrt(), torch.float32)  # float32's root is some processors' own
    return torch.where(square < torch.inf, (STD_RANGE / element.max * std + 1e-8) * reach, torch.nan)


# The range of each block, float32, from which its scale is made.
STATISTICS: dict[str, Callable[[Tensor, Tiles, ElementFormat, Cast], Tensor]] = {
    "absmax": absmax,
    "std": standard_deviation,
}


def e8m0(blocks: Tensor, a: Tensor, above: Tensor | None, cast: Cast, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Powers of two. Headroom cannot move them: the elements are smaller by it, and what decodes them divides by it."""
    element, bits = FORMATS[cast.format], a.view(torch.int32)
    if cast.scale_rule == CODE_BUMP:
        codes = scale_codes(bits, element, "floor", code_bump(blocks, tiles.axis))
    else:
        codes = scale_codes(bits, element, str(cast.scale_rule))
    scaled = divide_by_scales(blocks, codes)
    return codes.to(torch.uint8), scaled if cast.headroom == 1 else scaled * cast.headroom


def e4m3(blocks: Tensor, a: Tensor, above: Tensor | None, cast: Cast, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Scales on E4M3's grid. Their reciprocal is taken first, as NVIDIA's kernels and torchao do."""
    above = torch.ones_like(a) if above is None else above
    scales = e4m3_block_scales(a, above, FORMATS[cast.format].max * cast.headroom)
    reciprocal = torch.ones_like(above) / above / scales  # 1 / x compiles to an approximation
    return encode(scales, E4M3).view(torch.float8_e4m3fn), blocks * reciprocal


def fp32(blocks: Tensor, a: Tensor, above: Tensor | None, cast: Cast, tiles: Tiles) -> tuple[Tensor, Tensor]:
    scale = fill_scale(a, FORMATS[cast.format].max * cast.headroom)
    return scale, blocks / scale


def outer_alone(blocks: Tensor, a: Tensor, above: Tensor | None, cast: Cast, tiles: Tiles) -> tuple[Tensor, Tensor]:
    assert above is not None
    return torch.ones_like(above), blocks / above


# Codes of the block scales, and x over its scale, of blocks, their ranges and the scale above them.
SCALES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "E8M0": e8m0,
    "E4M3": e4m3,
    "FP32": fp32,
    "none": outer_alone,
}


def better(one: Quantized, other: Quantized, x: Tensor, tiles: Tiles, cast: Cast) -> Quantized:
    """The candidate whose block errs less, block by block; the first of equal ones."""
    errors = []
    for quantized in (one, other):
        error = tiles.split(quantized.dequantize() - x, bool(cast.pad))
        errors.append(pairwise_sum(error.square() if cast.candidate_error == "mse" else error.abs(), tiles.inner))
    takes_other = (errors[1] < errors[0]) | errors[0].isnan()  # the range times its factor may have overflowed
    everywhere = tiles.join(takes_other.expand(tiles.split(x, bool(cast.pad)).shape))
    codes = [q.scales.view(torch.uint8) if q.scales.itemsize == 1 else q.scales for q in (other, one)]
    scales = torch.where(tiles.squeeze(takes_other), codes[0], codes[1]).view(one.scales.dtype)
    values = torch.where(everywhere, other.values, one.values)
    inside = None
    if one.inside is not None and other.inside is not None:
        inside = torch.where(everywhere, other.inside, one.inside)
    return replace(one, values=values, scales=scales, inside=inside)


def outer_scale(x: Tensor, cast: Cast, axes: tuple[int, ...] | None = None) -> Tensor:
    """The scale above the blocks of x (float32): float32, over `axes`, kept as 1, or 0-dim over all of them."""
    if axes is None:
        x = x.flatten() if x.numel() else x.new_zeros(1)
        return scale_above(absmax_bits(x, 0).view(torch.float32).squeeze(0), cast)
    return scale_above(absmax_bits(x, axes).view(torch.float32), cast)


def scale_above(largest: Tensor, cast: Cast) -> Tensor:
    """The scale above the blocks of a tensor in which nothing is larger than that (float32)."""
    reach = FORMATS[cast.format].max * cast.headroom
    return scale_above_e4m3(largest, reach) if cast.scale == "E4M3" else fill_scale(largest, reach)


def as_scale(scale: Tensor | float, x: Tensor) -> Tensor:
    if not isinstance(scale, Tensor):
        check_tensor_scale(scale)
    return torch.as_tensor(scale, dtype=torch.float32, device=x.device)


def pre_rounded(x: Tensor, cast: Cast | BlockCast) -> Tensor:
    """x [...] float32 as its blocks are made of it, and as what exceeds their scales is counted."""
    rounds = cast.pre_round if isinstance(cast, Cast) else cast.operand_pre_round
    return round_to_bf16_away(x) if rounds else x


def check_format(cast: Cast, element: ElementFormat) -> None:
    """Raise ConfigError for a cast that is not filled, for scales that its format or its rule does not have, for vain
    random bits.
    """
    open_fields = [name for name in ("block_size", "pad", "scale_rule", "rounding", "pre_round") if cast.has(name)]
    missing = next((name for name in open_fields if getattr(cast, name) is None), None)
    require(missing is None, f"{missing}: is open; fill the cast with the run's settings first")
    require(
        element.scale == "E8M0" or cast.scale == element.scale,
        f"scale: {cast.format} has {element.scale} scales, not {cast.scale}; set it to {element.scale}, with an "
        f"outer_scale and blocks of {element.block_size}, or for other scales take format E2M1",
    )
    require(
        is_random(cast) or cast.random_bits == Cast.random_bits,
        f"random_bits: {cast.rounding} rounding draws none; leave it out",
    )
    if cast.scale == "E8M0":
        bump = CODE_BUMP if cast.format == E4M3.name and not cast.two_dimensional else ""
        require(
            cast.scale_rule != CODE_BUMP or bool(bump),
            f"scale_rule: {CODE_BUMP} is for E4M3 alone, not {cast.format}; take rceil",
        )
        require(
            cast.scale_rule != CODE_BUMP or len(cast.candidates) == 1,
            f"candidates: a block chooses among them, and {CODE_BUMP} gives each element a scale; leave them out",
        )
        if cast.scale_rule != CODE_BUMP:
            look_up(SCALE_RULES, str(cast.scale_rule), "scale_rule")
    if cast.format == "NVFP4":
        check_nvfp4(cast.format, BlockCast(cast.block_size or 0, pad_blocks=bool(cast.pad)))


def check_nvfp4(fmt: str, cast: BlockCast) -> None:
    """Raises ConfigError for what NVFP4 does not have."""
    if fmt != "NVFP4":
        return
    if cast.block_size != FORMATS["NVFP4"].block_size:
        raise ConfigError(f"block_size: NVFP4 has blocks of 16, not {cast.block_size}; set it to 16")
    if cast.pad_blocks:
        raise ConfigError("pad_blocks: those of NVFP4 have to be whole; set it to false")
    if cast.scale_rule != BlockCast.scale_rule:
        raise ConfigError(
            f"scale_rule: {cast.scale_rule} is for E8M0 scales; those of NVFP4 are E4M3, rounded to nearest"
        )


def check_tensor_scale(scale: float | None) -> None:
    """Raises ConfigError for a number that float32 does not hold, or that is not positive."""
    if scale is not None and not 2.0**-149 <= scale <= torch.finfo(torch.float32).max:
        raise ConfigError(f"tensor_scale: {scale}; give a number that is positive and finite in float32")
