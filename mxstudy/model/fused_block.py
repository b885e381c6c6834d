"""Decide whether a decoder's block can run in two fused functions, and build their settings.

A block in which nothing is quantised runs in them too, so that arms differ in their casts and not in their kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mxstudy.blocks.decoder_block import FusedBlock
from mxstudy.blocks.operands import ANY, kernel_settings
from mxstudy.model.activation_functions import KERNEL_ACTIVATIONS
from mxstudy.model.feed_forward import FeedForward
from mxstudy.model.fusable import Target
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.norm import kernel_norm, why_no_kernel_norm

if TYPE_CHECKING:
    from mxstudy.model.decoder import Block


def fused_linears(block: Block) -> tuple[NormLinear, MXLinear, NormLinear, MXLinear]:
    """Return the four linears of a block whose MLP is a FeedForward, in the order in which they run."""
    return block.attention.wqkv, block.attention.wo, block.feed_forward.up, block.feed_forward.w2


def why_not_fused_block(block: Block, target: Target) -> str | None:
    """Return the first reason why a decoder's block cannot run in two fused functions, or None if it can."""
    if type(block.feed_forward) is not FeedForward:
        return f"its MLP is a {type(block.feed_forward).__name__}, which has no kernel"
    linears = fused_linears(block)
    wqkv, _, up, w2 = linears
    if target.compute != torch.bfloat16:
        return f"kernels compute in bf16, and train.compute is {target.compute}"
    if target.compiled and target.device.type == "cpu":
        return "compiled on CPU, where the compiler fuses the modules itself but cannot look into our operators"
    if any(linear.compute is not None or linear.on_tensor_cores for linear in linears):
        return "its linears compute in their own dtype"
    for linear in linears:
        if reason := ANY.why_not(linear.gemms):
            return reason
    for linear in (wqkv, up):
        if reason := why_no_kernel_norm(linear.norm, kernel_settings(linear.cast).block_size):
            return reason
    if type(wqkv.norm) is not type(up.norm):
        return "its two norms are of different kinds"
    if block.feed_forward.activation not in KERNEL_ACTIVATIONS:
        return f"its activation ({block.feed_forward.kind}) has no kernel"
    sizes = {cast.block_size or 1 for linear in linears for _, cast in linear.gemms.casts()}
    for what, size in (("keys", block.attention.sizes[1]), ("the MLP's inner size", w2.in_features)):
        if uneven := [block_size for block_size in sizes if size % block_size]:
            return f"blocks of {uneven[0]} do not divide {what}, {size}"
    return None


def fused_block(block: Block) -> FusedBlock:
    """Return the settings of the block's two fused functions, for its linears' current formats."""
    linears = fused_linears(block)
    wqkv = linears[0]
    activation, sizes = KERNEL_ACTIVATIONS[block.feed_forward.activation], block.attention.sizes
    gemms, norm = (linear.gemms for linear in linears), kernel_norm(wqkv.norm)
    cast, head_size = kernel_settings(wqkv.cast), block.attention.head_size
    return FusedBlock(norm, wqkv.norm.fold_gain, activation, sizes, head_size, cast, *gemms)
