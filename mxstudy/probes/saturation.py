"""Measure saturation, underflow, scales and noise of every quantised operand, beside those of a Gaussian.

Saturation means little by itself: under the floor rule, 0.9 % of a Gaussian lies above max times its block scale.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mxstudy.blocks.plans import PLAIN, settings_of
from mxstudy.config.casts import Cast, gemm_of
from mxstudy.kernels.cast_counts import CastCounts, cast_counts, qualities
from mxstudy.model.decoder import Decoder
from mxstudy.model.linear import Sources
from mxstudy.numerics.cast import pre_rounded
from mxstudy.numerics.formats import is_random
from mxstudy.numerics.gemms import quantized_operand
from mxstudy.numerics.grid import to_dtype
from mxstudy.numerics.quality import (
    has_nonzero,
    max_fraction,
    overflow_fraction,
    sqnr_db,
    subnormal_scale_fraction,
    underflow_fraction,
)
from mxstudy.numerics.quantized import Quantized
from mxstudy.numerics.random_bits import Draws, stream_key
from mxstudy.probes.base import ScheduledProbe, StepView, Values
from mxstudy.probes.shadow import capture_linears, whole_blocks

# Operand -> the tensor that it is quantised from, and the axis of its blocks.
QUANTISED_FROM = {
    "forward_x": ("x_TI", -1),
    "forward_w": ("forward_weight", -1),
    "dgrad_dh": ("dh_TO", -1),
    "dgrad_w": ("weight", -2),
    "wgrad_dh": ("dh_TO", -2),
    "wgrad_x": ("x_TI", -2),
}
GAUSSIAN_SIZE, GAUSSIAN_SEED = 1024, 0


class Saturation(ScheduledProbe):
    """Quantities '<linear>/<operand>/<quantity>' over the first sequence of the batch, at the weights after the step.

    Output gradients are those of the batch's mean loss, as in training. Fractions of elements: overflow_fraction,
    |x| > max * scale; max_fraction, became max by clamping or rounding; underflow_fraction, became zero. sqnr_db.
    Each of these also has <quantity>_gaussian, for a Gaussian in that format and cast. scale_exponent_mean, _min, _max:
    floor(log2(scale)) over blocks that are not all zero. subnormal_scale_fraction, only for casts with E4M3 scales: of
    the blocks whose input is not all zero, the fraction with a scale below 2^-6; NaN without such a block. A block of
    wgrad is B tokens: the probe sees T // B blocks per feature, and drops the remaining tokens; a scale of the whole
    tensor is that of the one sequence. Experts are measured together, with the rows of zeros that pad their blocks, and
    each has its own scale of the whole tensor.
    """

    name = "saturation"

    @torch.no_grad()
    def measure(self, view: StepView) -> Values:
        assert isinstance(view.model, Decoder)
        captured = capture_linears(view.model, whole_blocks(view.model, view.first_sequence()), view.tokens)
        measured: dict[str, Tensor] = {}
        counted: dict[str, CastCounts] = {}
        values: Values = {}
        for name, capture in captured.items():
            for operand, source in operand_sources(capture.sources(), capture.dh_TO):
                key = f"{name}/{operand}"
                if has_kernel(source):
                    counted[key] = cast_counts(source.x, source.cast.format, source.axis, settings_of(source.cast))
                else:
                    quantized = source.quantized()
                    quantities = quality(quantized, source.x, source.cast) | scale_exponents(quantized)
                    measured |= {f"{key}/{quantity}": value for quantity, value in quantities.items()}
                gaussian = gaussian_quality(source.cast)
                values |= {f"{key}/{quantity}_gaussian": value for quantity, value in gaussian.items()}
        if measured:
            values |= dict(zip(measured, torch.stack(list(measured.values())).tolist(), strict=True))
        for key, found in zip(counted, qualities(list(counted.values())), strict=True):
            values |= {f"{key}/{quantity}": value for quantity, value in found.items()}
        return values


class OperandSource(NamedTuple):
    """The tensor that an operand is quantised from and, as in `quantized_operand`, how."""

    x: Tensor
    cast: Cast
    axis: int
    draws: Draws | None
    bound: Tensor | None

    def quantized(self) -> Quantized:
        return quantized_operand(self.x, self.cast, self.axis, self.draws, self.bound)


def has_kernel(source: OperandSource) -> bool:
    """Return whether a kernel measures the operand: a plain cast of a tensor that is whole on one GPU."""
    is_plain = type(source.x) in (Tensor, nn.Parameter) and not any(PLAIN.lacked_in(source.cast))
    return source.x.is_cuda and is_plain


def operand_sources(sources: Sources, dh_TO: Tensor) -> Iterator[tuple[str, OperandSource]]:
    """Yield, for every operand that a linear quantises, its name and the tensor that it is quantised from.

    If a transform rotates the operand, it is the rotated tensor, which the cast gets.
    """
    arithmetic = sources.linear
    for operand, (source, axis) in QUANTISED_FROM.items():
        cast = arithmetic.gemms.cast_of(operand)
        if cast is not None:
            x = dh_TO if source == "dh_TO" else getattr(sources, source)
            if cast.source == "forward":
                x = forward_cast(operand, sources)
            x = arithmetic.rotated(x, gemm_of(operand), axis)
            bound = arithmetic.bound(x, operand, sources.bounds)
            yield operand, OperandSource(x, cast, axis, arithmetic.draws(operand), bound)


def quantized_operands(sources: Sources, dh_TO: Tensor) -> Iterator[tuple[str, Quantized, Tensor]]:
    """Yield, for every operand that a linear quantises, its name, the quantised operand and the original tensor."""
    for operand, source in operand_sources(sources, dh_TO):
        yield operand, source.quantized(), source.x


def forward_cast(operand: str, sources: Sources) -> Tensor:
    """Return the dequantised operand of the forward GEMM from which a backward operand is quantised, float32."""
    if operand == "dgrad_w":
        return sources.linear.forward_cast(sources.forward_weight, "forward_w").dequantize()
    return sources.linear.forward_cast(sources.x_TI, "forward_x", sources.bounds).dequantize()


def quality(quantized: Quantized, x: Tensor, cast: Cast) -> dict[str, Tensor]:
    of_scales = {"subnormal_scale_fraction": subnormal_scale_fraction(quantized, x)} if cast.scale == "E4M3" else {}
    return {
        "overflow_fraction": overflow_fraction(quantized, pre_rounded(to_dtype(x, torch.float32), cast)),
        "max_fraction": max_fraction(quantized),
        "underflow_fraction": underflow_fraction(quantized, x),
        "sqnr_db": sqnr_db(quantized.dequantize(), x),
        **of_scales,
    }


def scale_exponents(quantized: Quantized) -> dict[str, Tensor]:
    """Return mean, min and max of floor(log2(scale)) over blocks that do not decode to zeros, float64 (0-dim).

    They are not finite if all blocks are zero, or a scale is NaN.
    """
    scales = quantized.scale_values
    counts = has_nonzero(quantized.values, quantized.tiles) & (scales != 0)
    exponents = torch.frexp(scales).exponent.double() - 1
    exponents = torch.where(scales.isnan(), torch.nan, exponents)
    return {
        "scale_exponent_mean": torch.where(counts, exponents, 0.0).sum() / counts.sum(),
        "scale_exponent_min": torch.where(counts, exponents, torch.inf).amin(),
        "scale_exponent_max": torch.where(counts, exponents, -torch.inf).amax(),
    }


@functools.cache
def gaussian_quality(cast: Cast) -> dict[str, float]:
    """Return `quality` of a million fixed N(0, 1) numbers, on the CPU; stochastic rounding is drawn once.

    There are 1024 rows and columns, or as many more as whole blocks need.
    """
    block_size = cast.block_size or 1
    columns = -(-GAUSSIAN_SIZE // block_size) * block_size
    rows = columns if cast.two_dimensional else GAUSSIAN_SIZE
    x = torch.randn((rows, columns), generator=torch.Generator().manual_seed(GAUSSIAN_SEED))
    key = torch.tensor(stream_key(GAUSSIAN_SEED, "gaussian"))
    draws = Draws(key, torch.zeros(2, dtype=torch.int64)) if is_random(cast) else None
    return {name: value.item() for name, value in quality(quantized_operand(x, cast, -1, draws), x, cast).items()}
