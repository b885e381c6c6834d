"""Draw initial weights from seed and name alone: equal for all devices, world sizes and stacks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator seeded by `seed` and `name`."""
    return generator_of(f"{seed}:{name}")


def generator_of(text: str) -> torch.Generator:
    """Return a CPU generator seeded with the first 63 bits of the text's sha256."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def normal_weight(shape: Sequence[int], stds: Sequence[float], generator: torch.Generator | None = None) -> Tensor:
    """Return a float32 weight from a normal truncated at 3 sigma; its rows are split evenly over the `stds`.

    Without a generator, torch's global one draws it. On the meta device nothing is drawn, because that would load the
    compiler.
    """
    std, weight = stds[0], torch.empty(*shape)
    if weight.is_meta:
        return weight
    nn.init.trunc_normal_(weight, 0.0, std, -3 * std, 3 * std, generator=generator)
    for part, own in zip(weight.chunk(len(stds), dim=-2)[1:], stds[1:], strict=True):
        part *= own / std
    return weight
