"""Which texts have been seen: a set of sha256 digests that costs 22 to 43 bytes for each.

A Python set of the same would cost 130, and there are 590 million documents in SlimPajama. A digest is told from others
by its first half, 128 bits.
"""

from __future__ import annotations

import numpy as np

from mxstudy.data.content_hash import DIGEST_BYTES

EMPTY = 0  # as the first word of a slot; a digest that begins with 64 zero bits is taken to begin with a 1
FULLEST = 0.75
MOVED_AT_ONCE = 2**20


class DigestSet:
    """An open-addressing hash table with linear probing; its rows are uint64 [2]."""

    def __init__(self) -> None:
        self.slots = np.zeros((2**16, 2), np.uint64)
        self.size = 0

    def add(self, digests: bytes) -> np.ndarray:
        """Which of n digests, one after the other, are new, the first of equal ones; bool [n]."""
        keys = np.frombuffer(digests, np.uint64).reshape(-1, DIGEST_BYTES // 8)[:, :2].copy()
        keys[keys[:, 0] == EMPTY, 0] = 1
        _, firsts = np.unique(keys, axis=0, return_index=True)
        while self.size + len(firsts) > FULLEST * len(self.slots):
            self.grow()
        new = np.zeros(len(keys), bool)
        new[firsts[self.put(keys[firsts])]] = True
        self.size += int(new.sum())
        return new

    def put(self, keys: np.ndarray) -> np.ndarray:
        """Of keys that differ, which were not there; bool [n]. Each goes from slot to slot until one is its own."""
        new = np.zeros(len(keys), bool)
        left = np.arange(len(keys))
        at = keys[:, 1] & np.uint64(len(self.slots) - 1)
        while len(left):
            free = self.slots[at, 0] == EMPTY
            self.slots[at[free]] = keys[left[free]]  # where two want one slot, the later has it
            own = (self.slots[at] == keys[left]).all(axis=1)
            new[left[own & free]] = True
            left, at = left[~own], (at[~own] + np.uint64(1)) & np.uint64(len(self.slots) - 1)
        return new

    def grow(self) -> None:
        old, self.slots = self.slots, np.zeros((2 * len(self.slots), 2), np.uint64)
        for start in range(0, len(old), MOVED_AT_ONCE):
            keys = old[start : start + MOVED_AT_ONCE]
            self.put(keys[keys[:, 0] != EMPTY])
