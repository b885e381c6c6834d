"""AdamW over all parameters, in FP32."""

from __future__ import annotations

import torch
from torch import nn

from mxstudy import config


def build_optimizer(model: nn.Module, optimizer: config.AdamW) -> torch.optim.AdamW:
    """Decays every parameter, gains included, as TorchTitan does."""
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
    """Give the optimizer the state that its first step would, so that a checkpoint has tensors to be read into."""
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = lr
