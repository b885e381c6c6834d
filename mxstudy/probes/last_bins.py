"""The fractions of tensors in the last bin of a format, as of a language model's gains (instability paper, figure 3).

For activations see `mxstudy.probes.saturation`, which counts those of every operand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mxstudy.blocks.plans import settings_of
from mxstudy.config.casts import BlockCast, Cast
from mxstudy.distributed import whole
from mxstudy.model.decoder import Decoder
from mxstudy.model.linear import MXLinear
from mxstudy.model.vector_settings import norms_of
from mxstudy.numerics.cast import block_cast, pre_rounded
from mxstudy.numerics.formats import CODE_BUMP, ROUNDINGS
from mxstudy.numerics.gaussian_bins import gaussian_last_bin
from mxstudy.numerics.quality import is_max, overflows
from mxstudy.numerics.tiles import join_blocks, split_blocks
from mxstudy.probes.base import ScheduledProbe, StepView, Values

PAPERS_RULE = "floor"  # the scale rule by which the instability paper counts; with rceil and ceil nothing overflows


class ProbedTensor(NamedTuple):
    """A tensor [S, ...] and the format and cast by which it is measured, in blocks along its last axis."""

    values: Tensor
    fmt: str
    cast: BlockCast


def fractions(tensors: Iterable[tuple[str, ProbedTensor]]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return last-bin fractions by name, float64 [S], and by format those of N(0, 1), exactly.

    '<tensor>/<scale rule>/overflow_fraction': strictly |v| > max * 2^k (instability paper, Eq. 2, and the count of its
    public code). '.../max_fraction': became max by clamping or rounding. Both by the run's scale rule and by floor.
    '<tensor>/literal_fraction': |v| > 0.875 absmax of its block, as Eq. 2 is printed; for N(0, 1) six times as many.
    'gaussian.<format>/...': the exact fractions of N(0, 1).
    """
    measured: dict[str, Tensor] = {}
    gaussian: dict[str, float] = {}
    for name, probed in tensors:
        measured[f"{name}/literal_fraction"] = share(near_absmax(probed))
        for rule in dict.fromkeys((probed.cast.scale_rule, PAPERS_RULE)):
            quantized = block_cast(probed.values, probed.fmt, -1, replace(probed.cast, scale_rule=rule))
            values = pre_rounded(probed.values.float(), probed.cast)
            measured[f"{name}/{rule}/overflow_fraction"] = share(overflows(quantized, values))
            measured[f"{name}/{rule}/max_fraction"] = share(is_max(quantized))
            if rule == CODE_BUMP:  # its scales depend on the number of neighbouring blocks
                continue
            expected = gaussian_last_bin(probed.fmt, probed.cast.block_size, rule)
            gaussian[f"gaussian.{probed.fmt}/{rule}/overflow_fraction"] = expected.overflow
            gaussian[f"gaussian.{probed.fmt}/{rule}/max_fraction"] = expected.max
    return measured, gaussian


class LastBin(ScheduledProbe):
    """`fractions` of every norm's gain and bias, by parameter, after the step.

    They are cast like the X of the linear that reads the norm (for queries and keys, the one that makes them), else
    like its W, else in E4M3, even if `precision.gain` does not ask for it. Where `precision.gain=mx` rounds them by a
    cast that `fractions` does not know, the run is refused (`check_gain_cast`). An incomplete block is filled with
    zeros.
    """

    name = "last_bin"

    @torch.no_grad()
    def measure(self, view: StepView) -> Values:
        assert isinstance(view.model, Decoder)
        measured, gaussian = fractions(vectors_of(view.model))
        if not measured:
            return {}
        return dict(zip(measured, torch.cat(list(measured.values())).tolist(), strict=True)) | gaussian


def vectors_of(model: Decoder) -> Iterator[tuple[str, ProbedTensor]]:
    """Yield name and values [1, size] of every norm's gain and bias, with the cast to measure them by."""
    for name, (norm, linear) in norms_of(model).items():
        casts = linear.gemms.forward_x, linear.gemms.forward_w
        for own, vector in norm.named_parameters():
            probed = as_probed(linear, whole(vector)[None], *casts)
            yield f"{name}.{own}", probed._replace(cast=replace(probed.cast, pad_blocks=True))


def as_probed(linear: MXLinear, values: Tensor, *casts: Cast | None) -> ProbedTensor:
    """Return the values with the cast to measure them by: the first with E8M0 block scales, else E4M3.

    Of that cast its format, block size, scale rule, rounding, pre-rounding and padding are taken, not its statistic,
    headroom, candidates or square blocks (`check_gain_cast`). Rounding to even replaces stochastic rounding, because
    only the range is measured.
    """
    cast = next((cast for cast in casts if cast is not None and cast.scale == "E8M0"), None)
    fmt, base = ("E4M3", linear.cast) if cast is None else (cast.format, settings_of(cast))
    return ProbedTensor(values, fmt, replace(base, rounding="even") if ROUNDINGS[base.rounding].draws else base)


def near_absmax(probed: ProbedTensor) -> Tensor:
    """Return where |v| exceeds 0.875 times its block's absmax: bool, in the values' shape."""
    axis = probed.values.ndim - 1
    blocks = split_blocks(probed.values.float().abs(), probed.cast.block_size, axis, pad=True)
    return join_blocks(blocks > 0.875 * blocks.amax(-1, keepdim=True), axis, probed.values.shape[-1])


def share(holds: Tensor) -> Tensor:
    """Return the fraction of true elements of each replica, float64 [S].

    It counts elements, because a mean would first convert all of them to float64.
    """
    return holds.flatten(1).sum(1).double() / holds[0].numel()
