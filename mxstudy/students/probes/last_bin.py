"""Measure which fraction of gains, weights and activations is in the last bin of its format, and the gains' spread."""

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
from mxstudy.students.probes.bias import PerReplica
from mxstudy.students.probes.shadow import blocks_of

PAPERS_RULE = "floor"  # the scale rule by which the instability paper counts; with rceil and ceil nothing overflows


class ProbedTensor(NamedTuple):
    """A tensor [S, ...] and the format and cast by which it is measured, in blocks along its last axis."""

    values: Tensor
    fmt: str
    cast: BlockCast


@torch.no_grad()
def last_bin(model: ResidualMLP, x_TD: Tensor) -> PerReplica:
    """Return last-bin fractions and the gains' statistics, one value per replica, for the batch x.

    '<tensor>/<scale rule>/overflow_fraction': strictly |v| > max * 2^k (instability paper, Eq. 2, and the count of its
    public code). '.../max_fraction': became max by clamping or rounding. Both by the run's scale rule and by floor.
    '<tensor>/literal_fraction': |v| > 0.875 absmax of its block, as Eq. 2 is printed; for N(0, 1) six times as many.
    'gaussian.<format>/...': the exact fractions of N(0, 1). '<gain>/mean', std (ddof 0), min, max.

    Tensors: parameters by name; 'layers.N.up.input' and so on, what the linears quantise (up and down, with attention
    also attention.qkv and attention.out); 'layers.N.output', the residual stream. The format is the forward's. A tensor
    that the run does not quantise (the public code quantises no gains) is measured as if it did: in the format of the
    linear's other operand, else in E4M3. A folded gain is also in the weight.
    """
    measured: dict[str, Tensor] = {}
    gaussian: dict[str, float] = {}
    for name, probed in probed_tensors(model, x_TD):
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
    for name, gain in gains_of(model).items():
        measured |= {f"{name}/{statistic}": value for statistic, value in spread(gain).items()}
    lists = torch.stack(list(measured.values())).tolist()
    return dict(zip(measured, lists, strict=True)) | {name: [x] * len(lists[0]) for name, x in gaussian.items()}


def probed_tensors(model: ResidualMLP, x_TD: Tensor) -> Iterator[tuple[str, ProbedTensor]]:
    """Yield the name and tensor of everything that `last_bin` measures."""
    captured = activations(model, x_TD)
    for name, block in blocks_of(model).items():
        for part, linear in linears_of(name, block).items():
            x, weight = linear.gemms.forward_x, linear.gemms.forward_w
            yield f"{part}.input", as_probed(linear, operand_of(linear, captured[part]), x, weight)
            yield f"{part}.weight", as_probed(linear, weight_of(linear), weight, x)
            for gain_name, gain in gains_of(linear).items():
                yield f"{part}.{gain_name}", as_probed(linear, gain, weight, x)
        yield f"{name}.output", as_probed(block.up, captured[name], block.up.gemms.forward_x, block.up.gemms.forward_w)


def linears_of(name: str, block: StudentBlock) -> dict[str, MXLinear]:
    return {part: module for part, module in block.named_modules(prefix=name) if isinstance(module, MXLinear)}


def as_probed(linear: MXLinear, values: Tensor, *casts: Cast | None) -> ProbedTensor:
    """Return the values with the cast to measure them by: the first with E8M0 block scales, else E4M3.

    Stochastic rounding is replaced by rounding to even, because only the range is measured.
    """
    cast = next((cast for cast in casts if cast is not None and cast.scale == "E8M0"), None)
    fmt, base = ("E4M3", linear.cast) if cast is None else (cast.format, settings_of(cast))
    return ProbedTensor(values, fmt, replace(base, rounding="even") if ROUNDINGS[base.rounding].draws else base)


def activations(model: ResidualMLP, x_TD: Tensor) -> dict[str, Tensor]:
    """Return {module name: tensor}: the input of each linear and the output of each block."""
    captured: dict[str, Tensor] = {}
    model = model.sharing()  # module by module, so that the tensor between two linears exists
    with ExitStack() as hooks:
        for name, module in model.named_modules():

            def keep(module: nn.Module, inputs: tuple[Tensor], output: Tensor, name: str = name) -> None:
                captured[name] = output if isinstance(module, StudentBlock) else inputs[0]

            if isinstance(module, StudentBlock | MXLinear):
                hooks.callback(module.register_forward_hook(keep).remove)
        model(x_TD)
    return captured


def operand_of(linear: MXLinear, x: Tensor) -> Tensor:
    """Return what the forward of a linear with input x quantises: x, or its norm's output without a folded gain."""
    if not isinstance(linear, NormLinear):
        return x
    if linear.norm.fold_gain:
        return linear.normalize(x)
    x = x.float() if linear.norm.output == "fused" else x  # otherwise the norm's output is rounded to x's dtype
    return linear.norm.apply_affine(x, *linear.gain_and_bias(x))


def weight_of(linear: MXLinear) -> Tensor:
    """Return the weight that the forward GEMM quantises, a folded gain included."""
    if isinstance(linear, NormLinear) and linear.norm.fold_gain:
        return linear.weight * linear.gain_and_bias(linear.weight)[0]
    return linear.weight


def near_absmax(probed: ProbedTensor) -> Tensor:
    """Return where |v| exceeds 0.875 times its block's absmax: bool, in the values' shape."""
    axis = probed.values.ndim - 1
    blocks = split_blocks(probed.values.float().abs(), probed.cast.block_size, axis, pad=True)
    return join_blocks(blocks > 0.875 * blocks.amax(-1, keepdim=True), axis, probed.values.shape[-1])


def share(holds: Tensor) -> Tensor:
    """Return the fraction of true elements of each replica, float64 [S].

    It counts, because a mean would first convert all elements to float64.
    """
    return holds.flatten(1).sum(1).double() / holds[0].numel()


def spread(gain: Tensor) -> dict[str, Tensor]:
    """Return mean, std (ddof 0), min and max of a gain for each replica: float64 [S] each."""
    gain = gain.flatten(1).double()
    return {"mean": gain.mean(1), "std": gain.std(1, correction=0), "min": gain.amin(1), "max": gain.amax(1)}
