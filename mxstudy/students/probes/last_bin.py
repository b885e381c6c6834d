"""How much of gains, weights and activations lies in the last bin of its format, and where the gains are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mxstudy.blocks.operands import settings_of
from mxstudy.config.casts import BlockCast, Cast
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.numerics.cast import block_cast, join_blocks, pre_rounded, split_blocks
from mxstudy.numerics.formats import CODE_BUMP, ROUNDINGS
from mxstudy.numerics.gaussian_bins import gaussian_last_bin
from mxstudy.numerics.quality import is_max, overflows
from mxstudy.probes.weights import gains_of
from mxstudy.students.model import ResidualMLP, StudentBlock
from mxstudy.students.probes.bias import Rows
from mxstudy.students.probes.shadow import blocks_of

PAPERS_RULE = "floor"  # that by which the instability paper counts; under rceil and ceil nothing overflows


class ProbedTensor(NamedTuple):
    """A tensor [S, ...] and the cast that it is seen through, in blocks along its last axis."""

    values: Tensor
    fmt: str
    cast: BlockCast


@torch.no_grad()
def last_bin(model: ResidualMLP, x_TD: Tensor) -> Rows:
    """'<place>/<scale rule>/overflow_fraction' and '.../max_fraction' of each replica, by the run's rule and by floor.

    overflow: strictly |v| > max * 2^k (instability paper, Eq. 2, and its public code's count). max: became max, clamped
    or rounded. Places: parameters by name, 'layers.N.up.input' and so on, which are what the linears quantise (up and
    down, with attention also attention.qkv and attention.out), and 'layers.N.output', the residual stream. The format
    is the forward's; where the run quantises no such thing (that code quantises no gains) it is what would happen: in
    the format of the linear's other operand, else in E4M3. A gain that is folded is in the weight too.
    'gaussian.<format>/...': of N(0, 1), exactly. '<place>/literal_fraction': |v| > 0.875 absmax of its block, as Eq. 2
    is printed: of N(0, 1) six times as many.

    '<gain>/mean', std (ddof 0), min, max.
    """
    measured: dict[str, Tensor] = {}
    gaussian: dict[str, float] = {}
    for name, place in places(model, x_TD):
        measured[f"{name}/literal_fraction"] = share(near_absmax(place))
        for rule in dict.fromkeys((place.cast.scale_rule, PAPERS_RULE)):
            quantized = block_cast(place.values, place.fmt, -1, replace(place.cast, scale_rule=rule))
            values = pre_rounded(place.values.float(), place.cast)
            measured[f"{name}/{rule}/overflow_fraction"] = share(overflows(quantized, values))
            measured[f"{name}/{rule}/max_fraction"] = share(is_max(quantized))
            if rule == CODE_BUMP:  # its scales depend on how many blocks there are beside each other
                continue
            expected = gaussian_last_bin(place.fmt, place.cast.block_size, rule)
            gaussian[f"gaussian.{place.fmt}/{rule}/overflow_fraction"] = expected.overflow
            gaussian[f"gaussian.{place.fmt}/{rule}/max_fraction"] = expected.max
    for name, gain in gains_of(model).items():
        measured |= {f"{name}/{what}": value for what, value in spread(gain).items()}
    lists = torch.stack(list(measured.values())).tolist()
    return dict(zip(measured, lists, strict=True)) | {name: [x] * len(lists[0]) for name, x in gaussian.items()}


def places(model: ResidualMLP, x_TD: Tensor) -> Iterator[tuple[str, ProbedTensor]]:
    seen = activations(model, x_TD)
    for name, block in blocks_of(model).items():
        for part, linear in linears_of(name, block).items():
            x, weight = linear.gemms.forward_x, linear.gemms.forward_w
            yield f"{part}.input", place(linear, operand_of(linear, seen[part]), x, weight)
            yield f"{part}.weight", place(linear, weight_of(linear), weight, x)
            for gain_name, gain in gains_of(linear).items():
                yield f"{part}.{gain_name}", place(linear, gain, weight, x)
        yield f"{name}.output", place(block.up, seen[name], block.up.gemms.forward_x, block.up.gemms.forward_w)


def linears_of(name: str, block: StudentBlock) -> dict[str, MXLinear]:
    return {part: module for part, module in block.named_modules(prefix=name) if isinstance(module, MXLinear)}


def place(linear: MXLinear, values: Tensor, *wanted: Cast | None) -> ProbedTensor:
    """Return the place in the first of the casts `wanted` whose block scales are powers of two, else in E4M3.

    What is rounded at random is seen as rounded to even: the counts are of the range.
    """
    cast = next((cast for cast in wanted if cast is not None and cast.scale == "E8M0"), None)
    fmt, seen = ("E4M3", linear.cast) if cast is None else (cast.format, settings_of(cast))
    return ProbedTensor(values, fmt, replace(seen, rounding="even") if ROUNDINGS[seen.rounding].draws else seen)


def activations(model: ResidualMLP, x_TD: Tensor) -> dict[str, Tensor]:
    """What goes into each linear, and what comes out of each block, by the module's name."""
    seen: dict[str, Tensor] = {}
    model = model.sharing()  # with a tensor between two linears
    with ExitStack() as hooks:
        for name, module in model.named_modules():

            def keep(module: nn.Module, inputs: tuple[Tensor], output: Tensor, name: str = name) -> None:
                seen[name] = output if isinstance(module, StudentBlock) else inputs[0]

            if isinstance(module, StudentBlock | MXLinear):
                hooks.callback(module.register_forward_hook(keep).remove)
        model(x_TD)
    return seen


def operand_of(linear: MXLinear, x: Tensor) -> Tensor:
    """What the forward quantises of a linear's input: after a norm its output, without a gain that is folded."""
    if not isinstance(linear, NormLinear):
        return x
    if linear.norm.fold_gain:
        return linear.norm.normalize(x)
    x = x.float() if linear.norm.output == "fused" else x  # else rounded to x's dtype before it is cast
    return linear.norm.apply_affine(x, *linear.gain_and_bias(x))


def weight_of(linear: MXLinear) -> Tensor:
    if isinstance(linear, NormLinear) and linear.norm.fold_gain:
        return linear.weight * linear.gain_and_bias(linear.weight)[0]
    return linear.weight


def near_absmax(place: ProbedTensor) -> Tensor:
    """Bool, of the values' shape."""
    axis = place.values.ndim - 1
    blocks = split_blocks(place.values.float().abs(), place.cast.block_size, axis, pad=True)
    return join_blocks(blocks > 0.875 * blocks.amax(-1, keepdim=True), axis, place.values.shape[-1])


def share(holds: Tensor) -> Tensor:
    """Of the elements of each replica, float64 [S]; counted, for a mean would first make float64 of all of them."""
    return holds.flatten(1).sum(1).double() / holds[0].numel()


def spread(gain: Tensor) -> dict[str, Tensor]:
    gain = gain.flatten(1).double()
    return {"mean": gain.mean(1), "std": gain.std(1, correction=0), "min": gain.amin(1), "max": gain.amax(1)}
