"""Build and set up the optimizer: AdamW over all parameters, in FP32."""

from __future__ import annotations

import torch
from torch import nn

from mxstudy import config


def build_optimizer(model: nn.Module, optimizer: config.AdamW) -> torch.optim.AdamW:
    """Return AdamW with weight decay on every parameter, gains included, as in TorchTitan."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def materialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the optimizer's first step would create, so that a checkpoint can be read into it."""
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = lr
