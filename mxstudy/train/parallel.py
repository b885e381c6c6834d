"""What is done to the blocks of a built model, in the order in which it must be done."""

from __future__ import annotations

from torch import nn
from torch.utils.checkpoint import checkpoint

from mxstudy import config


def parallelize(layers: nn.ModuleList, train: config.Train) -> None:
    """Activation checkpointing, then compilation: block by block, in place, names unchanged."""
    for block in layers:
        if train.activation_checkpointing == "full":
            recompute_in_backward(block)
        if train.compile:
            block.compile(fullgraph=True)


def recompute_in_backward(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)
