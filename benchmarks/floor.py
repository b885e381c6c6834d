"""Measure the floor of a norm and cast: the fastest of several kernels that only move as many bytes.

Each kernel reads N bf16 numbers and writes a code of 8 or 4 bits per number and a byte per block.
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
    """Return the bytes that a one-pass norm and cast of bf16 x [rows, columns] moves, with each row's float32 RMS."""
    return x.numel() * 2 + x.numel() * FORMATS[fmt].bits // 8 + x.numel() // block_size + 4 * len(x)


def copies(x: Tensor, fmt: str, block_size: int) -> dict[str, Callable[[Tensor], object]]:
    """Return {name: function of a tensor in x's shape that moves as many bytes in total as the cast}.

    The first reads as many bytes as it writes. The others, on a GPU only, read and write as many each as the cast does.
    """
    half = moved_bytes(x, fmt, block_size) // 2
    calls: dict[str, Callable[[Tensor], object]] = {EVEN: lambda x: x.view(torch.uint8).flatten()[:half].clone()}
    if x.is_cuda:
        calls |= {f"{words} x {warps}": partial(triton_copy, fmt, block_size, words, warps) for words, warps in TILES}
    return calls


def triton_copy(fmt: str, block_size: int, tile: int, warps: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of the cast's sizes from the copy kernel, at `tile` pairs of numbers per program."""
    from benchmarks.floor_kernel import copy_kernel

    pairs = x.view(torch.int32).flatten()
    assert len(pairs) % tile == 0
    codes = torch.empty(len(pairs), dtype={8: torch.int16, 4: torch.int8}[FORMATS[fmt].bits], device=x.device)
    scales = torch.empty(x.numel() // block_size, dtype=torch.int8, device=x.device)
    options = {"BLOCKS": tile * 2 // block_size, "TILE": tile, "num_warps": warps}
    copy_kernel[(len(pairs) // tile,)](pairs, codes, scales, **options)
    return codes, scales
