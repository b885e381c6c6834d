"""The few PTX instructions that kernels have as text, on NumPy arrays, as PTX's specification (8.8) has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

Words = np.ndarray  # int32


def pairs(x: Words) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.int16)


def permuted(x: Words, y: Words, selector: Words) -> Words:
    """A byte by each four bits of the selector, the lowest first: from x, then y; with bit 3 its sign, eight times."""
    several = np.broadcast_arrays(x, y)
    bytes_of = np.stack([np.ascontiguousarray(one).view(np.uint8).reshape(*one.shape, 4) for one in several], axis=-2)
    bytes_of = bytes_of.reshape(*bytes_of.shape[:-2], 8)
    result = np.empty((*bytes_of.shape[:-1], 4), np.uint8)
    for i in range(4):
        chosen = int(selector) >> 4 * i & 15
        byte = bytes_of[..., chosen & 7]
        result[..., i] = np.where(byte >= 128, 255, 0) if chosen & 8 else byte
    return result.view(np.int32)[..., 0]


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "add.s16x2": lambda x, y: (pairs(x) + pairs(y)).view(np.int32),
    "max.s16x2": lambda x, y: np.maximum(pairs(x), pairs(y)).view(np.int32),
    "min.s16x2.relu": lambda x, y: np.maximum(np.minimum(pairs(x), pairs(y)), 0).view(np.int32),
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "mul.lo.u32": lambda x, y: (x.astype(np.int64) * y).astype(np.uint32).view(np.int32),
    "prmt.b32": permuted,
}


def run(text: str, operands: Sequence[Words], pack: int) -> np.ndarray:
    """What `tl.inline_asm_elementwise` gives: int32, or uint8 where a register has the results of `pack` > 1 words."""
    registers = {}
    for i, operand in enumerate(operands):
        grouped = np.ascontiguousarray(operand).reshape(*operand.shape[:-1], -1, pack)
        for j in range(pack):
            registers[f"${1 + pack * i + j}"] = np.ascontiguousarray(grouped[..., j])
    for line in filter(None, re.split(r"[;{}\s]*[;{}]\s*", text.strip())):
        name, *words = re.split(r"[\s,]+", line.strip())
        if name != ".reg":
            target, *sources = words
            values = [registers[w] if w in registers else np.int32(np.uint32(int(w, 0))) for w in sources]
            registers[target] = INSTRUCTIONS[name](*values)
    result = registers["$0"]
    return result if pack == 1 else result[..., None].view(np.uint8).reshape(operands[0].shape)
