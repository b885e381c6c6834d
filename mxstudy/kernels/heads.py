"""Rotate queries and keys in place; rotate their gradients back, join those of values, and cast the result twice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, library

from mxstudy.kernels.cast_both import launch_cuda as launch_cast_both
from mxstudy.kernels.operators import (
    BF16,
    UNREAD,
    CastConstants,
    Casts,
    Tile,
    argument_of,
    both,
    ceil_power_of_two,
    check_tile,
    checked_casts,
    constants,
    empty_both,
    launch,
    power_of_two_in,
)
from mxstudy.kernels.packing import pack
from mxstudy.numerics.cast import BlockCast
from mxstudy.numerics.rotary import rotate, rotate_back
from mxstudy.reader import require

ROUNDED = pack(Casts(None, UNREAD, 32, "rceil", "even", False))  # one operand, which is only rounded to bf16


class Part(NamedTuple):
    """Heads as the kernel is compiled for them; strides are those of rows.

    `start`: their first column where they are written. `together`: heads per program. `back`: rotate by the negative
    angles.
    """

    read_stride: int
    start: int
    stride: int
    half: int  # half of a head's features
    heads: int
    together: int
    back: bool


def rotate_heads_(qkv: Tensor, rope: Tensor, columns: int, head_size: int) -> None:
    """Rotate the heads in the first `columns` of qkv [B T, features] bf16, in place; rounded once, as by `rotate`.

    `rope`: the angles, float32 [T, H / 2] or [B, T, H / 2]. Raises ConfigError for qkv that is not bf16, or whose rows
    do not follow one another in memory.
    """
    require(qkv.dtype == BF16, f"qkv: the kernel takes bfloat16, not {qkv.dtype}")
    require(qkv.is_contiguous(), f"qkv: {list(qkv.shape)} with strides {qkv.stride()} is not contiguous; give a copy")
    _rotate_heads(qkv, rope, columns, head_size)


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


@library.custom_op("mxstudy::rotate_heads_", mutates_args=("qkv",))
def _rotate_heads(qkv: Tensor, rope: Tensor, columns: int, head_size: int) -> None:
    heads = qkv[:, :columns].unflatten(-1, (-1, head_size)).unflatten(0, (-1, rope.shape[-2]))
    heads.copy_(rotate(heads, rope))


@_rotate_heads.register_fake
def _(qkv: Tensor, rope: Tensor, columns: int, head_size: int) -> None:
    pass


@_rotate_heads.register_kernel("cuda")
def launch_cuda_rotate(qkv: Tensor, rope: Tensor, columns: int, head_size: int, tile: Tile | None = None) -> None:
    rows, stride = qkv.shape
    part = Part(stride, 0, stride, head_size // 2, columns // head_size, 1, back=False)
    launch_part(qkv, turning(rope), (qkv, None), rows, part, constants(ROUNDED), tile)


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

    The result does not depend on the tile. Blocks that span both halves of a head are cast by a kernel of their own.
    """
    (rows, stride), half, known = flat_shape(dq, dk, dv), dq.shape[-1] // 2, constants(casts)
    if (known.row or known.column) and half % known.block:
        dqkv, _ = launch_cuda(dq, dk, dv, rope, ROUNDED)
        return launch_cast_both(dqkv, casts)
    operands = empty_both(dq.new_empty((rows, stride)), casts)
    turns, start = None if rope is None else turning(rope), 0
    for x, turn in ((dq, turns), (dk, turns), (dv, None)):
        columns = x.shape[2] * x.shape[3]
        part = Part(columns, start, stride, half, x.shape[2], 1, back=True)
        launch_part(x.contiguous(), turn, (argument_of(operands[0]), argument_of(operands[1])), rows, part, known, tile)
        start += columns
    return operands


def turning(rope: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the angles, float32 [positions, H / 2]."""
    return rope.cos().flatten(0, -2), rope.sin().flatten(0, -2)


def launch_part(
    x: Tensor,
    turns: tuple[Tensor, Tensor] | None,
    operands: tuple[Tensor | None, Tensor | None],
    rows: int,
    part: Part,
    known: CastConstants,
    tile: Tile | None,
) -> None:
    """Launch the kernel on the heads of x, as many at once as the registers of a program have room for."""
    from mxstudy.kernels.device.heads import heads_cast_both_kernel

    tile = tile or tile_of_heads(rows, part.half, known)
    check_tile("columns", tile.columns, part.half)
    most = 2 if known.row or known.column else 8
    part = part._replace(together=next(n for n in range(most, 0, -1) if part.heads % n == 0))
    cos, sin = turns or (None, None)
    launch(
        heads_cast_both_kernel,
        (-(-rows // tile.rows) * (part.half // tile.columns) * (part.heads // part.together),),
        (x, cos, sin, *operands, rows, 1 if cos is None else len(cos)),
        tile.warps,
        PART=part,
        TILE=tile,
        CAST=known,
    )


def tile_of_heads(rows: int, half: int, known: CastConstants) -> Tile:
    """Return a tile of half a head, or a part of it; with casts it has whole blocks."""
    if known.row or known.column:
        side = max(known.block, 32)
        return Tile(side, min(power_of_two_in(half), side), warps=2 if side == 32 else 4)
    width = min(power_of_two_in(half), 64)
    return Tile(min(1024 // width, ceil_power_of_two(rows)), width, warps=4)
