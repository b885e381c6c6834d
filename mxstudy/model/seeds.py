"""Random generators seeded by a seed and a name alone: equal for all devices, world sizes and widths of a stack."""

from __future__ import annotations

import hashlib

import torch


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator seeded by `seed` and `name`."""
    return generator_of(f"{seed}:{name}")


def generator_of(text: str) -> torch.Generator:
    """Return a CPU generator seeded with the first 63 bits of the text's sha256."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
