"""Draw N(0, 1) as a pure function of (seed, stream, step, index): without state, on any device, in a CUDA graph.

The bits come from a counter that is mixed (SplitMix64, as in `mxstudy.data.permutation`), not from a sequence, so a
step does not depend on earlier steps, and two shapes have the same numbers at the same indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mxstudy.compat.torch_compiler import constant
from mxstudy.data.permutation import SPLITMIX, mix
from mxstudy.reader import require

STREAMS = ("inputs", "noise", "validation", "own_noise", "disk_noise")  # of one seed; the position here enters the key
INCREMENT, FIRST, SECOND = (int(np.uint64(x).astype(np.int64)) for x in SPLITMIX)


def gaussian_samples(
    seed: int, stream: str, step: int | Tensor, shape: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Return float32 N(0, 1) samples of that shape.

    `step` counts from 0; in a captured graph it is an int64 0-dim tensor on the device. Results may differ between
    devices and compilers in the last bit: the integers are equal, but logarithm and cosine may not be.
    """
    require(stream in STREAMS, f"stream: {stream!r} is not one of {', '.join(STREAMS)}")
    index = torch.arange(math.prod(shape), device=device)
    bits = mix_bits(mix_bits(key(seed, stream) ^ torch.as_tensor(step, device=device)) ^ index)
    radius = (-2 * torch.log(uniform(bits >> 32))).sqrt()  # Box and Muller 1958
    return (radius * torch.cos(2 * math.pi * uniform(bits))).to(torch.float32).reshape(tuple(shape))


def uniform(bits: Tensor) -> Tensor:
    """Return the low 32 bits as float64 in the open interval (0, 1)."""
    return ((bits & 0xFFFFFFFF).to(torch.float64) + 0.5) * 2.0**-32


@constant
def key(seed: int, stream: str) -> int:
    """Return the key of a seed's stream, an int in the int64 range."""
    start = mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(STREAMS.index(stream))
    return int(mix(start).astype(np.int64)[0])


def mix_bits(x: Tensor) -> Tensor:
    """Return `permutation.mix` computed in int64: sums and products wrap as in uint64, and right shifts are masked."""
    x = x + INCREMENT
    x = (x ^ shift_right(x, 30)) * FIRST
    x = (x ^ shift_right(x, 27)) * SECOND
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, places: int) -> Tensor:
    return (x >> places) & (2 ** (64 - places) - 1)


def student_inputs(
    data_seed: int, step: int | Tensor, batch_size: int, hidden_size: int, device: torch.device
) -> Tensor:
    """Return inputs x [T, D] float32, i.i.d. N(0, 1), the same for all replicas of a stack."""
    return gaussian_samples(data_seed, "inputs", step, (batch_size, hidden_size), device)


def label_noise(
    data_seed: int,
    step: int | Tensor,
    batch_size: int,
    hidden_size: int,
    device: torch.device,
    std: float,
    stream: str,
) -> Tensor:
    """Return the noise added to the teacher's output, [T, D] float32, the same for all replicas of a stack."""
    return std * gaussian_samples(data_seed, stream, step, (batch_size, hidden_size), device)
