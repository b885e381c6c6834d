"""FP32 versions of a student, which read its parameters as they are, and gradients by parameter.

`loss` maps the student's output [S, T, D] and the targets, so too, to [S].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mxstudy.config.casts import Gemms
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.numerics.norm_linear import affine
from mxstudy.students.model import VECTOR_OPS, ResidualMLP, StudentBlock

FP32_OPS = VECTOR_OPS["fp32"]

Loss = Callable[[Tensor, Tensor], Tensor]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def blocks_of(model: ResidualMLP) -> dict[str, StudentBlock]:
    """By name, in the order in which they come."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StudentBlock)}


def gradients(model: nn.Module, loss: Loss, x_STD: Tensor, target_STD: Tensor) -> dict[str, Tensor]:
    """Of each replica's loss, by trainable parameter [S, ...]; eager, and `.grad` stays what it is."""
    parameters = trainable(model)
    with torch.enable_grad():
        losses = loss(model(x_STD), target_STD)
    return dict(zip(parameters, torch.autograd.grad(losses.sum(), list(parameters.values())), strict=True))


def in_fp32(model: ResidualMLP) -> ResidualMLP:
    """The student with FP32 GEMMs, vector operations and gains, and nothing quantised; it shares the parameters.

    Its norm is the run's, estimated or not, with the straight-through gradient that training has.
    """
    shadow = model.sharing()
    shadow.ops = FP32_OPS
    for block in blocks_of(shadow).values():
        block.ops = FP32_OPS
    for module in shadow.modules():
        if isinstance(module, MXLinear):
            module.gemms, module.compute = Gemms(), torch.float32
        if isinstance(module, NormLinear):
            module.gain, module.norm.output = "fp32", FP32_OPS.norm
    return shadow


def smooth_forward(model: ResidualMLP, x_STD: Tensor) -> Tensor:
    """The FP32 student's output [S, T, D] by torch's own operations alone, which can be differentiated twice.

    The derivatives are those of the function: of a norm that estimates its RMS not the straight-through ones, and of
    PostRoundMXNorm, whose estimate moves in steps, those between two steps.
    """
    replicas = next(model.parameters()).shape[:-2]
    x = x_STD.expand(*replicas, *x_STD.shape[-2:])
    for block in blocks_of(model).values():
        if block.attention is not None:
            qkv = smooth_linear(block.attention.qkv, x)
            y = block.attention.attend(qkv, lambda a, b: a @ b.mT, FP32_OPS.activation)
            x = x + smooth_linear(block.attention.out, y)
        y = smooth_linear(block.down, block.activation.apply(smooth_linear(block.up, x), FP32_OPS))
        x = y if block.bias is None else x + (y + block.bias)
    return x


def smooth_linear(linear: MXLinear, x: Tensor) -> Tensor:
    if isinstance(linear, NormLinear):
        x = affine(linear.norm.normalize(x), *linear.norm.parameters_as(x))
    return x @ linear.weight.mT
