"""Random numbers that depend on a seed and a name alone: equal over devices, world sizes, and widths of a stack."""

from __future__ import annotations

import hashlib

import torch


def generator_for(seed: int, name: str) -> torch.Generator:
    """On CPU."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
