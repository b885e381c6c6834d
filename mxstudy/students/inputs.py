"""N(0, 1) as a pure function of (seed, stream, step, index): no state, on any device, inside of a CUDA graph.

The bits are counted and mixed (SplitMix64, as in `batches`), not drawn in turn, so that a step needs no step before it,
and two shapes agree where their indices do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mxstudy.compat.torch_compiler import constant
from mxstudy.data.batches import mix
from mxstudy.reader import require

STREAMS = ("inputs", "noise", "validation", "own_noise", "disk_noise")  # of one seed; a place is a number
LABEL_STD = 0.005  # instability paper's public code
INCREMENT, FIRST, SECOND = (
    int(np.uint64(x).astype(np.int64))
    for x in (
        0x9E3779B97F4A7C15,
        0xBF58476D1CE4E5B9,
        0x94D049BB133111EB,
    )
)


def gaussian_samples(
    seed: int, stream: str, step: int | Tensor, shape: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """float32 of that shape; `step` from 0, a tensor (int64, 0-dim, on the device) where a captured graph counts it.

    Devices and compilers may differ in the last bit: the integers are the same, logarithm and cosine need not be.
    """
    require(stream in STREAMS, f"stream: {stream!r} is not one of {', '.join(STREAMS)}")
    index = torch.arange(math.prod(shape), device=device)
    bits = mix_bits(mix_bits(key(seed, stream) ^ torch.as_tensor(step, device=device)) ^ index)
    radius = (-2 * torch.log(uniform(bits >> 32))).sqrt()  # Box and Muller 1958
    return (radius * torch.cos(2 * math.pi * uniform(bits))).to(torch.float32).reshape(tuple(shape))


def uniform(bits: Tensor) -> Tensor:
    """The low 32 bits as float64 inside of (0, 1)."""
    return ((bits & 0xFFFFFFFF).to(torch.float64) + 0.5) * 2.0**-32


@constant
def key(seed: int, stream: str) -> int:
    """int64."""
    start = mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(STREAMS.index(stream))
    return int(mix(start).astype(np.int64)[0])


def mix_bits(x: Tensor) -> Tensor:
    """`batches.mix` of int64 for uint64: products and sums wrap alike, and a shift to the right is masked."""
    x = x + INCREMENT
    x = (x ^ shift_right(x, 30)) * FIRST
    x = (x ^ shift_right(x, 27)) * SECOND
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, places: int) -> Tensor:
    return (x >> places) & (2 ** (64 - places) - 1)


def student_inputs(
    data_seed: int, step: int | Tensor, batch_size: int, hidden_size: int, device: torch.device
) -> Tensor:
    """x [T, D] float32, i.i.d. N(0, 1), the same for all replicas of a stack."""
    return gaussian_samples(data_seed, "inputs", step, (batch_size, hidden_size), device)


def label_noise(
    data_seed: int,
    step: int | Tensor,
    batch_size: int,
    hidden_size: int,
    device: torch.device,
    std: float = LABEL_STD,
    stream: str = "noise",
) -> Tensor:
    """What is added to the teacher's output, [T, D] float32, the same for all replicas of a stack."""
    return std * gaussian_samples(data_seed, stream, step, (batch_size, hidden_size), device)
