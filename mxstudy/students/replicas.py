"""Turn a model into a stack of replicas: every parameter gets a leading dimension, the forward pass stays the same."""

from __future__ import annotations

import torch
from torch import nn


def stack(model: nn.Module, replicas: int) -> None:
    """Replace all parameters, uninitialised: weights [out, in] by [S, out, in], gains and biases [in] by [S, 1, in].

    The model then takes [S, ..., in], so that each replica has its own samples.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            row = (1,) * (2 - parameter.ndim)
            stacked = torch.empty(replicas, *row, *parameter.shape, dtype=parameter.dtype, device=parameter.device)
            module.register_parameter(name, nn.Parameter(stacked, parameter.requires_grad))
