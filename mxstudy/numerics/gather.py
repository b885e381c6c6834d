"""All-gather of a tensor in MX: each rank casts its rows and sends codes and scales (Transformer Engine, MXFP8).

A scale belongs to one block, so ranks whose shards are complete blocks can cast without agreeing on anything first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mxstudy.numerics.cast import QUANTIZABLE, Quantized, block_size_of, quantize
from mxstudy.numerics.formats import FORMATS, look_up
from mxstudy.reader import require


def all_gather_mx(
    x_local: Tensor,
    fmt: str,
    axis: int,
    group: dist.ProcessGroup | None = None,
    block_size: int | None = None,
    scale_rule: str = "rceil",
    rounding: str = "even",
) -> Quantized:
    """Concatenate the shards [rows / ranks, columns] (bf16, fp16 or fp32) of the ranks of `group` along the rows.

    `axis`: -1 for row-wise blocks, 0 for column-wise blocks, which need a multiple of the block size as a shard's rows.
    Codes, scales and dequantised values equal, bit by bit, those of `quantize` of the gathered tensor with the same
    options; no gradient flows. Each rank sends one byte per element (half a byte for 4 bits), the scales, and first 32
    bytes about its shard, for which the host waits. Scales are returned unswizzled, because swizzled ones cannot be
    concatenated: call `swizzle_scales` right before the GEMM.

    Raises ConfigError for what `quantize` refuses, NVFP4, shards of different shapes, and without a process group.
    """
    require(
        dist.is_available() and dist.is_initialized(),
        "torch.distributed: not initialised; call torch.distributed.init_process_group first",
    )
    require(dist.get_rank(group) >= 0, "group: this rank is not in it; call it on the group's ranks only")
    element = look_up(FORMATS, fmt, "format")
    require(element.scale == "E8M0", f"format: {fmt} has a tensor scale, which no rank knows; take an MX format")
    _check_shards(x_local, group)  # before any check that could fail on one rank while the others wait for it
    block_size = block_size_of(fmt, block_size)
    rows = len(x_local)
    require(
        axis not in (0, -2) or rows % block_size == 0,
        f"x_local: {rows} rows a rank; blocks along the rows need a multiple of {block_size}: none may cross ranks",
    )
    local = quantize(x_local.detach(), fmt, block_size, axis, scale_rule, rounding)
    codes, scales = _gather_rows(local.codes, group), _gather_rows(local.scales, group)
    return Quantized.from_codes(codes, scales, fmt, local.axis, block_size)


def _check_shards(x_local: Tensor, group: dist.ProcessGroup | None) -> None:
    """Raise ConfigError on every rank if any shard is not a matrix or not quantisable, or if shapes differ.

    A gather of different sizes would hang or write nonsense. The message sent here has one size for every shard.
    """
    about = [x_local.ndim, *(*x_local.shape, 0, 0)[:2], x_local.dtype in QUANTIZABLE]
    shards = _gather_rows(torch.tensor([about], dtype=torch.int64, device=x_local.device), group).tolist()
    for rank, (ndim, _, _, is_quantizable) in enumerate(shards):
        require(ndim == 2, f"x_local: {ndim} dimension(s) on rank {rank}; give [rows, columns]")
        require(is_quantizable, f"dtype: rank {rank}'s cannot be quantised; give float32, bfloat16 or float16")
    shapes = [shard[1:3] for shard in shards]
    listed = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
    require(all(shape == shapes[0] for shape in shapes), f"x_local: shards differ: {listed}; give all the same shape")


def _gather_rows(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate the [rows, columns] of every rank: [ranks * rows, columns]."""
    rows, columns = local.shape
    gathered = local.new_empty(dist.get_world_size(group) * rows, columns)
    dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
    return gathered
