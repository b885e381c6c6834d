"""Which blocks of a decoder run in two functions (`mxstudy.numerics.joined_block`): those of which kernels can do all.

Elsewhere a block runs module by module. Both ways are the same arithmetic, on CPU bit by bit; on a GPU, kernels sum in
an order of their own. What is chosen here is speed. `Block.is_free` has the reasons of the moment.
"""

from __future__ import annotations

import torch

from mxstudy.model.decoder import Block
from mxstudy.model.norm import MXNorm, Norm
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.joined_block import JoinedBlock
from mxstudy.numerics.kernels.activation import ACTIVATIONS
from mxstudy.numerics.matmul import Gemms
from mxstudy.numerics.norm_mlp import has_kernels


def joined(block: Block, compute: torch.dtype) -> JoinedBlock | None:
    """In the formats that the block's linears now have; None for module by module."""
    linears = block.linears()
    wqkv, _, up, w2 = linears
    cast, quantised = wqkv.cast, [linear for linear in linears if linear.gemms != Gemms()]
    row_norm, activation = wqkv.norm.row_norm, block.feed_forward.kind
    can = (
        compute == torch.bfloat16
        and all(linear.compute is None and not linear.on_tensor_cores for linear in linears)
        and bool(quantised)  # else there is nothing to cast, and nothing to gain
        and all(has_kernels(linear.gemms, linear.cast) for linear in quantised)
        and all(linear.cast == cast for linear in linears)
        and all(norm_has_kernels(linear.norm, cast) for linear in (wqkv, up))
        and all(linear.gain is None for linear in (wqkv, up))
        and activation in ACTIVATIONS
        and block.attention.sizes[1] % cast.block_size == 0  # so have those of queries, keys and values
        and w2.in_features % cast.block_size == 0  # the gradients of gate and up have blocks of their own
    )
    if not can or row_norm is None:
        return None
    gemms = [linear.gemms for linear in linears]
    sizes, head_size = block.attention.sizes, block.attention.head_size
    return JoinedBlock(row_norm, wqkv.norm.fold_gain, activation, sizes, head_size, cast, *gemms)


def norm_has_kernels(norm: Norm, cast: BlockCast) -> bool:
    """MXNorm's maxima are those of the cast's blocks."""
    own_blocks = isinstance(norm, MXNorm) and norm.block_size != cast.block_size
    return norm.row_norm is not None and norm.output == "joined" and not own_blocks
