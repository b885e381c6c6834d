"""The fractions of a student's gains, weights and activations in the last bin of their formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.modules import modules_of
from mxstudy.probes.last_bins import ProbedTensor, as_probed, fractions
from mxstudy.probes.weights import gains_of, moments
from mxstudy.students.model import ResidualMLP, StudentBlock
from mxstudy.students.probes.bias import PerReplica


@torch.no_grad()
def last_bin(model: ResidualMLP, x_TD: Tensor) -> PerReplica:
    """Return `fractions` and the gains' `moments`, one value per replica, for the batch x.

    Tensors: parameters by name; 'layers.N.up.input' and so on, what the linears quantise (up and down, with attention
    also attention.qkv and attention.out); 'layers.N.output', the residual stream. The format is the forward's. A tensor
    that the run does not quantise (the public code quantises no gains) is measured as if it did: in the format of the
    linear's other operand, else in E4M3. A folded gain is also in the weight.
    """
    measured, gaussian = fractions(probed_tensors(model, x_TD))
    for name, gain in gains_of(model).items():
        measured |= {f"{name}/{statistic}": value for statistic, value in moments(gain).items()}
    lists = torch.stack(list(measured.values())).tolist()
    return dict(zip(measured, lists, strict=True)) | {name: [x] * len(lists[0]) for name, x in gaussian.items()}


def probed_tensors(model: ResidualMLP, x_TD: Tensor) -> Iterator[tuple[str, ProbedTensor]]:
    """Yield the name and tensor of everything that `last_bin` measures."""
    captured = activations(model, x_TD)
    for name, block in modules_of(model, StudentBlock).items():
        for own_name, linear in modules_of(block, MXLinear).items():
            part = f"{name}.{own_name}"
            x, weight = linear.gemms.forward_x, linear.gemms.forward_w
            yield f"{part}.input", as_probed(linear, operand_of(linear, captured[part]), x, weight)
            yield f"{part}.weight", as_probed(linear, weight_of(linear), weight, x)
            for gain_name, gain in gains_of(linear).items():
                yield f"{part}.{gain_name}", as_probed(linear, gain, weight, x)
        yield f"{name}.output", as_probed(block.up, captured[name], block.up.gemms.forward_x, block.up.gemms.forward_w)


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
