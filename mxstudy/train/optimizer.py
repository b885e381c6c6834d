"""Build and set up the optimizer, a row of `OPTIMIZERS`, and clip the gradients that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from mxstudy import config
from mxstudy.distributed import whole

# The optimizer of each config: parameters and config to the optimizer, with its state in FP32.
OPTIMIZERS: dict[type, Callable[[Iterable[nn.Parameter], Any], torch.optim.Optimizer]] = {
    config.AdamW: lambda parameters, adamw: torch.optim.AdamW(
        parameters, lr=adamw.lr, betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay, fused=True
    ),
}


def build_optimizer(model: nn.Module, optimizer: config.AdamW) -> torch.optim.Optimizer:
    """Return the optimizer of all parameters; weight decay is on every one, gains included, as in TorchTitan."""
    return OPTIMIZERS[type(optimizer)](model.parameters(), optimizer)


def clip_gradients(model: nn.Module, most: float) -> Tensor:
    """Scale the gradients so that their norm is at most `most`, as torch's `clip_grad_norm_` does; returns the norm.

    torch multiplies by one where the norm is below that already: here no gradient is then read or written again. The
    step waits for the norm anyway, to see whether it is finite.
    """
    parameters = list(model.parameters())
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    norm_of_all = whole(norm)
    if not most / (norm_of_all + 1e-6) >= 1:  # NaN too
        clip_grads_with_norm_(parameters, most, norm)
    return norm_of_all


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
