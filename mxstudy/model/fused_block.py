"""Decide whether a decoder's block can run in two fused functions, and build their settings.

A block that quantises nothing runs in them too, so that arms differ in their casts and not in their kernels.
"""

from __future__ import annotations

import typing
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mxstudy.blocks.decoder_block import FusedBlock
from mxstudy.blocks.plans import ANY, kernel_settings, plan_of
from mxstudy.model.activation_functions import KERNEL_ACTIVATIONS
from mxstudy.model.feed_forward import FeedForward
from mxstudy.model.fusable import Backend, Target, why_not_known
from mxstudy.model.linear import MXLinear, NormLinear
from mxstudy.model.norm import kernel_norm, why_no_kernel_norm
from mxstudy.reader import ConfigError

if TYPE_CHECKING:
    from mxstudy.model.decoder import Block, Decoder


def fused_linears(block: Block) -> tuple[NormLinear, MXLinear, NormLinear, MXLinear]:
    """Return the four linears of a block whose MLP is a FeedForward, in the order in which they run."""
    return block.attention.wqkv, block.attention.wo, block.feed_forward.up, block.feed_forward.w2


def why_not_fused_block(block: Block, target: Target) -> str | None:
    """Return the first reason why a decoder's block cannot run in two fused functions, or None if it can."""
    if reason := why_not_known("MLP", block.feed_forward, FeedForward):
        return reason
    linears = fused_linears(block)
    wqkv, wo, up, w2 = linears
    for name, linear, known in (
        ("wqkv", wqkv, NormLinear),
        ("wo", wo, MXLinear),
        ("MLP's first linear", up, NormLinear),
        ("w2", w2, MXLinear),
    ):
        if reason := why_not_known(name, linear, known):
            return reason
    if block.attention.dropout is not None:
        return "model.dropout: its masks have no kernel"
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
    if kernel_norm(wqkv.norm) != kernel_norm(up.norm) or wqkv.norm.fold_gain != up.norm.fold_gain:
        return "its two norms differ"
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
    cast, head_size, norm = kernel_settings(wqkv.cast), block.attention.head_size, kernel_norm(wqkv.norm)
    plans = (plan_of(linear.gemms, cast) for linear in linears)
    return FusedBlock(norm, wqkv.norm.fold_gain, activation, sizes, head_size, cast, *plans)


def recompute_mlps(model: Decoder, blocks: int) -> None:
    """Let the backward of the first `blocks` blocks compute the product of their MLP's first linear again.

    Raises ConfigError for a block that does not run fused, because its modules keep what they need.
    """
    for layer in range(blocks):
        block = typing.cast("Block", model.layers[layer])
        backend = typing.cast(Backend, block.backend)
        if block.fused is None:
            why = f" ({backend.why})" if backend.why else ""
            raise ConfigError(
                f"train.recompute_mlp: layers.{layer} runs on {backend.name}{why}, and only a fused block computes a "
                "product again; set it to 0"
            )
        block.fused = replace(block.fused, recomputes_up=True)
