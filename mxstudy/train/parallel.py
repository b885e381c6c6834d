"""Prepare a built model that has no weights yet: compilation, activation checkpointing and sharding."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from mxstudy import config
from mxstudy.compat.torch_fsdp import allow_views
from mxstudy.compat.torch_modules import hooks_of
from mxstudy.distributed import world_size
from mxstudy.model.decoder import Decoder
from mxstudy.model.modules import modules_of
from mxstudy.model.moe import mixtures_of
from mxstudy.model.precision import DTYPES


def mesh_of_ranks(device: torch.device) -> DeviceMesh | None:
    """Return the one-dimensional mesh of all ranks, or None for one rank.

    One rank needs no sharding, and so keeps FP32 weights, which some probes read.
    """
    return init_device_mesh(device.type, (world_size(),)) if world_size() > 1 else None


def parallelize(model: Decoder, train: config.Train, mesh: DeviceMesh | None = None) -> None:
    """Set up compilation, activation checkpointing and sharding block by block, in place; names stay unchanged.

    The final norm is compiled as well, on its own.

    Every parameter, its gradient and its optimizer state are sharded along the first axis over the ranks of `mesh`
    (FSDP2, ZeRO stage 3). A block's weights are rounded to the compute dtype, gathered whole before the block runs, and
    freed after it, so an MX cast sees whole weights, and its blocks are those of a single process. Gradients are summed
    in FP32. A block with a router is gathered in FP32, which the router needs, and rounded where it is used, because a
    separate group for the router inside a block could not be compiled. Embedding (in FP32), final norm and head are
    gathered once per step. Without a mesh nothing is sharded. Once memory is allocated, `mxstudy.model.all_gather` can
    replace the gather.
    """
    for block in model.layers:
        if train.activation_checkpointing == "full":
            recompute_in_backward(block, train.compile)
        elif train.compile:
            block.compile(fullgraph=True)
    if train.compile:
        model.norm.compile(fullgraph=True)  # in eager mode it reads and writes all tokens in FP32 a dozen times
    if mesh is not None:
        allow_views()
        policy = MixedPrecisionPolicy(DTYPES[train.compute], torch.float32, cast_forward_inputs=False)
        in_fp32 = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
        for block in model.layers:
            fully_shard(block, mesh=mesh, mp_policy=in_fp32 if mixtures_of(block) else policy)
        others = hooks_of(model.output)
        fully_shard([model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        model.output.hooks_of_sharding = hooks_of(model.output) - others
        fully_shard(model, mesh=mesh, mp_policy=in_fp32, reshard_after_forward=False)  # the embedding
        sum_gradients(model)


def recompute_in_backward(block: nn.Module, compiled: bool) -> None:
    """Keep nothing but the block's inputs for its backward, which runs the forward again.

    Checkpointing is outside what is compiled: inside, torch 2.11 keeps what the fused functions save.
    """
    forward = torch.compile(block.forward, fullgraph=True) if compiled else block.forward
    block.forward = lambda *inputs: checkpoint(forward, *inputs, use_reentrant=False)


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP sum gradients over ranks instead of averaging: the loss is already divided by all ranks' tokens."""
    for module in modules_of(model, FSDPModule).values():
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def drop_gathered(model: nn.Module) -> None:
    """Free the gathered weights after a forward without a backward.

    Otherwise the model would continue with these rounded copies instead of its shards.
    """
    for module in modules_of(model, FSDPModule).values():
        module.reshard()
