"""Build and set up the optimizer, a row of `OPTIMIZERS`, and do its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mxstudy import config

# By config, the function that builds the optimizer, with its state in FP32, from parameters and config.
OPTIMIZERS: dict[type, Callable[[Iterable[nn.Parameter], Any], torch.optim.Optimizer]] = {
    config.AdamW: lambda parameters, adamw: torch.optim.AdamW(
        parameters, lr=adamw.lr, betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay, fused=True
    ),
}


def build_optimizer(model: nn.Module, optimizer: config.AdamW) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters; weight decay applies to all of them, gains included, as in TorchTitan."""
    return OPTIMIZERS[type(optimizer)](model.parameters(), optimizer)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def step_unless(optimizer: torch.optim.Optimizer, diverged: Tensor) -> None:
    """Do the optimizer's step unless `diverged`, bool []; a fused one checks it on the device, else the host waits."""
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = diverged.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif not diverged.item():
        optimizer.step()


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
