"""Run the few PTX instructions that kernels contain as text on NumPy arrays, as PTX's specification (8.8) defines them.

A reciprocal or a power of two, which a GPU approximates, is rounded to nearest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

Words = np.ndarray  # int32
NAN = 0x7FFF  # bf16's


def pairs(x: Words) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.int16)


def permuted(x: Words, y: Words, selector: Words) -> Words:
    """Return the bytes of x and y that the selector chooses.

    Each four bits of the selector, lowest first, choose a byte from x, then y. With bit 3 set, the result is that
    byte's sign bit, repeated eight times.
    """
    several = np.broadcast_arrays(x, y)
    bytes_of = np.stack([np.ascontiguousarray(one).view(np.uint8).reshape(*one.shape, 4) for one in several], axis=-2)
    bytes_of = bytes_of.reshape(*bytes_of.shape[:-2], 8)
    result = np.empty((*bytes_of.shape[:-1], 4), np.uint8)
    for i in range(4):
        chosen = int(selector) >> 4 * i & 15
        byte = bytes_of[..., chosen & 7]
        result[..., i] = np.where(byte >= 128, 255, 0) if chosen & 8 else byte
    return result.view(np.int32)[..., 0]


def halves(x: Words) -> list[np.ndarray]:
    """Return both bf16 numbers of a word as float32, the lower first."""
    x = np.asarray(x, np.int32)
    return [(half.astype(np.int32)).view(np.float32) for half in (x << 16, x & np.int32(-0x10000))]


def word_of(low: np.ndarray, high: np.ndarray) -> Words:
    """Return two numbers, which float64 holds exactly, rounded to bf16. A NaN has one pattern."""
    bits = []
    for half in np.broadcast_arrays(low, high):
        x = torch.from_numpy(np.array(half, np.float64)).to(torch.float32).to(torch.bfloat16)
        bits.append(np.where(x.isnan().numpy(), NAN, x.view(torch.int16).numpy()).astype(np.int16))
    return np.ascontiguousarray(np.stack(bits, -1)).view(np.int32)[..., 0]


def multiply_add(x: Words, y: Words, z: Words) -> Words:
    with np.errstate(all="ignore"):
        of_halves = zip(halves(x), halves(y), halves(z), strict=True)
        return word_of(*(a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64) for a, b, c in of_halves))


def larger_magnitude(x: Words, y: Words) -> Words:
    """Return for each half the larger magnitude, or NaN, with the product of the signs."""
    most = np.maximum(pairs(x) & 0x7FFF, pairs(y) & 0x7FFF)
    signs = (pairs(x) ^ pairs(y)) & np.int16(-0x8000)
    return (np.where(most > 0x7F80, np.int16(NAN), most) | signs).astype(np.int16).view(np.int32)


def power_of_two(x: np.ndarray) -> np.ndarray:
    """Return 2^x of float32, or 0 where that is subnormal."""
    with np.errstate(over="ignore", under="ignore"):
        y = np.exp2(x.astype(np.float64)).astype(np.float32)
    return np.where(y < np.finfo(np.float32).tiny, np.float32(0), y)


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "add.s16x2": lambda x, y: (pairs(x) + pairs(y)).view(np.int32),
    "max.s16x2": lambda x, y: np.maximum(pairs(x), pairs(y)).view(np.int32),
    "min.s16x2.relu": lambda x, y: np.maximum(np.minimum(pairs(x), pairs(y)), 0).view(np.int32),
    "min.s16x2": lambda x, y: np.minimum(pairs(x), pairs(y)).view(np.int32),
    "fma.rn.bf16x2": multiply_add,
    "max.NaN.xorsign.abs.bf16x2": larger_magnitude,
    "cvt.rn.bf16x2.f32": lambda high, low: word_of(low, high),
    "rcp.approx.ftz.f32": lambda x: np.float32(1) / x,
    "ex2.approx.ftz.f32": power_of_two,
    "mov.b32": lambda x: x,
    "lop3.b32": lambda x, y, mask, table: {0xE4: (x & mask) | (y & ~mask)}[int(table)],
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "mul.lo.u32": lambda x, y: (x.astype(np.int64) * y).astype(np.uint32).view(np.int32),
    "prmt.b32": permuted,
}


def run(text: str, operands: Sequence[Words], pack: int) -> np.ndarray:
    """Return what `tl.inline_asm_elementwise` gives.

    The result is int32, or uint8 where a register holds the results of `pack` > 1 words.
    """
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
