"""Random numbers that depend on a seed and a name alone: equal over devices, world sizes, and widths of a stack."""

from __future__ import annotations

import hashlib

import torch


def generator_for(seed: int, name: str) -> torch.Generator:
    """On CPU."""
    return generator_of(f"{seed}:{name}")


def generator_of(text: str) -> torch.Generator:
    """On CPU; seeded with the first 63 bits of the text's sha256."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
