"""FP32 versions of a student that share its parameters, and gradients by parameter.

`loss` maps the student's output [S, T, D] and the targets [S, T, D] to the losses [S].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mxstudy.config.casts import Gemms
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.numerics.norm_linear import affine
from mxstudy.students.model import VECTOR_OPS, ResidualMLP

FP32_OPS = VECTOR_OPS["fp32"]

Loss = Callable[[Tensor, Tensor], Tensor]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradients(model: nn.Module, loss: Loss, x_STD: Tensor, target_STD: Tensor) -> dict[str, Tensor]:
    """Return {trainable parameter: gradient [S, ...]} of each replica's loss; eager, and `.grad` is left unchanged."""
    parameters = trainable(model)
    with torch.enable_grad():
        losses = loss(model(x_STD), target_STD)
    return dict(zip(parameters, torch.autograd.grad(losses.sum(), list(parameters.values())), strict=True))


def in_fp32(model: ResidualMLP) -> ResidualMLP:
    """Return the student in FP32 (GEMMs, vector operations, gains), nothing quantised; it shares the parameters.

    Its norm is the run's, whether it estimates the RMS or not, with the straight-through gradient of training.
    """
    shadow = model.sharing()
    shadow.ops = FP32_OPS
    for block in shadow.blocks:
        block.ops = FP32_OPS
    for module in shadow.modules():
        if isinstance(module, MXLinear):
            module.gemms, module.compute = Gemms(), torch.float32
        if isinstance(module, NormLinear):
            module.gain, module.norm.output = "fp32", FP32_OPS.norm
    return shadow


def smooth_forward(model: ResidualMLP, x_STD: Tensor) -> Tensor:
    """Return the FP32 student's output [S, T, D], computed by torch operations that can be differentiated twice.

    Derivatives are the function's own: for a norm that estimates its RMS, not the straight-through ones, and for
    PostRoundMXNorm, whose estimate is a step function, those between two steps.
    """
    replicas = next(model.parameters()).shape[:-2]
    x = x_STD.expand(*replicas, *x_STD.shape[-2:])
    for block in model.blocks:
        if block.attention is not None:
            qkv = smooth_linear(block.attention.qkv, x)
            y = block.attention.attend(qkv, lambda a, b: a @ b.mT, FP32_OPS.activation)
            x = x + smooth_linear(block.attention.out, y)
        y = smooth_linear(block.down, block.activation.apply(smooth_linear(block.up, x), FP32_OPS))
        x = y if block.bias is None else x + (y + block.bias)
    return x


def smooth_linear(linear: MXLinear, x: Tensor) -> Tensor:
    if isinstance(linear, NormLinear):
        x = affine(linear.normalize(x), *linear.norm.parameters_as(x))
    return x @ linear.weight.mT
