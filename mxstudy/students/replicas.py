"""A model as a stack of replicas: every parameter with a leading dimension, the forward pass as it is."""

from __future__ import annotations

import torch
from torch import nn


def stack(model: nn.Module, replicas: int) -> None:
    """Parameters anew, not initialised: weights [out, in] become [S, out, in], gains and biases [in] [S, 1, in].

    The model then takes [S, ..., in], where each replica has samples of its own.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            row = (1,) * (2 - parameter.ndim)
            stacked = torch.empty(replicas, *row, *parameter.shape, dtype=parameter.dtype, device=parameter.device)
            module.register_parameter(name, nn.Parameter(stacked, parameter.requires_grad))
