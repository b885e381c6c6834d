"""Rotate the gradients of queries and keys back, put them beside that of values, and cast that twice, in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, library

from mxstudy.kernels.operators import (
    BF16,
    UNREAD,
    Tile,
    both,
    checked_casts,
    constants,
    empty_both,
    launch,
    tile_of,
    written,
)
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.rotary import rotate_back
from mxstudy.reader import require


class Part(NamedTuple):
    """One of dq, dk and dv as the kernel is compiled for it: its columns, and where they start in a row of `stride`."""

    start: int
    stride: int
    half: int  # half of a head's features
    columns: int


def heads_cast_both(
    dq: Tensor, dk: Tensor, dv: Tensor, rope: Tensor | None, row: str | None, column: str | None, cast: BlockCast
) -> tuple[Tensor, Tensor]:
    """Cast dq, dk, dv [B, T, heads, H] bf16 for both contractions: two bf16 operands [B T, all heads' H].

    `rope`: the angles by which queries and keys were rotated, float32 [T, H / 2] or [B, T, H / 2]; None if they were
    not. Rotated gradients are rounded to bf16 before they are cast. Raises ConfigError as `checked_casts` does, and
    if a block would span two of the three gradients.
    """
    for name, part in (("dq", dq), ("dk", dk), ("dv", dv)):
        require(part.dtype == BF16, f"{name}: {part.dtype} is not what attention in bfloat16 gives; give bfloat16")
        require(
            row in (None, UNREAD) or part.shape[2] * part.shape[3] % cast.block_size == 0,
            f"block_size: {cast.block_size} does not divide the heads of {name}, {list(part.shape)}",
        )
    return _heads_cast_both(dq, dk, dv, rope, checked_casts(flat_shape(dq, dk, dv), row, column, cast))


def flat_shape(*parts: Tensor) -> tuple[int, int]:
    rows = parts[0].shape[0] * parts[0].shape[1]
    return rows, sum(part.shape[2] * part.shape[3] for part in parts)


@library.custom_op("mxstudy::heads_cast_both", mutates_args=())
def _heads_cast_both(dq: Tensor, dk: Tensor, dv: Tensor, rope: Tensor | None, casts: str) -> tuple[Tensor, Tensor]:
    dq, dk = (part if rope is None else rotate_back(part, rope) for part in (dq, dk))
    dqkv = torch.cat([part.flatten(2).flatten(0, 1) for part in (dq, dk, dv)], dim=-1)
    return both(dqkv, casts)


@_heads_cast_both.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, rope: Tensor | None, casts: str) -> tuple[Tensor, Tensor]:
    return empty_both(dq.new_empty(flat_shape(dq, dk, dv)), casts)


@_heads_cast_both.register_kernel("cuda")
def launch_cuda(
    dq: Tensor, dk: Tensor, dv: Tensor, rope: Tensor | None, casts: str, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel. `tile`: a tile other than the usual one, with whole blocks.

    The result does not depend on the tile.
    """
    from mxstudy.kernels.device.heads import heads_cast_both_kernel

    shape, known = flat_shape(dq, dk, dv), constants(casts)
    operands = empty_both(dq.new_empty(shape), casts)
    turned = (None, None, 1) if rope is None else (rope.cos(), rope.sin(), rope.numel() // rope.shape[-1])
    start = 0
    for part, (cos, sin, positions) in ((dq, turned), (dk, turned), (dv, (None, None, 1))):
        columns = part.shape[2] * part.shape[3]
        of_part = tile or tile_of(shape[0], columns, known.block, elements=2048)
        launch(
            heads_cast_both_kernel,
            (shape[0] * columns // (of_part.rows * of_part.columns),),
            (part.contiguous(), cos, sin, *map(written, operands), positions),
            of_part.warps,
            PART=Part(start, shape[1], part.shape[3] // 2, columns),
            TILE=of_part,
            CAST=known,
        )
        start += columns
    return operands
