"""The floor: the fastest of several kernels that do nothing but move as many bytes.

Each reads N bf16 numbers and writes a code of 8 or 4 bits for every number and a byte for every block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mxstudy.numerics.formats import FORMATS

EVEN = "copy_"  # reads as many bytes as it writes
TILES = [(words, warps) for words in (1024, 2048, 4096, 8192) for warps in (4, 8) if words // warps <= 1024]


def moved_bytes(x: Tensor, fmt: str, block_size: int) -> int:
    """By a norm and cast of bf16 x [rows, columns] in one pass, its float32 RMS of every row included."""
    return x.numel() * 2 + x.numel() * FORMATS[fmt].bits // 8 + x.numel() // block_size + 4 * len(x)


def copies(x: Tensor, fmt: str, block_size: int) -> dict[str, Callable[[Tensor], object]]:
    """By name, of what is shaped as x; the first reads as many bytes as it writes, the others, which are a GPU's, as
    many as the cast.
    """
    half = moved_bytes(x, fmt, block_size) // 2
    found: dict[str, Callable[[Tensor], object]] = {EVEN: lambda x: x.view(torch.uint8).flatten()[:half].clone()}
    if x.is_cuda:
        found |= {f"{words} x {warps}": partial(triton_copy, fmt, block_size, words, warps) for words, warps in TILES}
    return found


def triton_copy(fmt: str, block_size: int, tile: int, warps: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """`tile`: pairs of numbers a program."""
    from benchmarks.floor_kernel import copy_kernel

    pairs = x.view(torch.int32).flatten()
    assert len(pairs) % tile == 0
    codes = torch.empty(len(pairs), dtype={8: torch.int16, 4: torch.int8}[FORMATS[fmt].bits], device=x.device)
    scales = torch.empty(x.numel() // block_size, dtype=torch.int8, device=x.device)
    options = {"BLOCKS": tile * 2 // block_size, "TILE": tile, "num_warps": warps}
    copy_kernel[(len(pairs) // tile,)](pairs, codes, scales, **options)
    return codes, scales
