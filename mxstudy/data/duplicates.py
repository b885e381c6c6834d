"""A set of sha256 digests, 22 to 43 bytes per digest, to find texts that have been seen before.

A Python set would need 130 bytes per digest, and SlimPajama has 590 million documents. Digests are compared by their
first half, 128 bits.
"""

from __future__ import annotations

import numpy as np

from mxstudy.data.content_hash import DIGEST_BYTES

EMPTY = 0  # the first word of an empty slot; the first word of a digest that begins with 64 zero bits is stored as 1
FULLEST = 0.75  # largest share of slots in use
MOVED_AT_ONCE = 2**20  # slots


class DigestSet:
    """A hash table with open addressing and linear probing; each slot holds 128 bits, uint64 [2]."""

    def __init__(self) -> None:
        self.slots = np.zeros((2**16, 2), np.uint64)
        self.size = 0

    def add(self, digests: bytes) -> np.ndarray:
        """Add n concatenated digests. Return which were new, bool [n]; the first of several equal ones counts."""
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
        """Store distinct keys, uint64 [n, 2]. Return which were not there before, bool [n].

        Each key moves on from slot to slot until it finds itself or an empty slot that no later key claims.
        """
        new = np.zeros(len(keys), bool)
        left = np.arange(len(keys))
        at = keys[:, 1] & np.uint64(len(self.slots) - 1)
        while len(left):
            free = self.slots[at, 0] == EMPTY
            self.slots[at[free]] = keys[left[free]]  # if two keys want the same slot, the later one gets it
            own = (self.slots[at] == keys[left]).all(axis=1)
            new[left[own & free]] = True
            left, at = left[~own], (at[~own] + np.uint64(1)) & np.uint64(len(self.slots) - 1)
        return new

    def grow(self) -> None:
        old, self.slots = self.slots, np.zeros((2 * len(self.slots), 2), np.uint64)
        for start in range(0, len(old), MOVED_AT_ONCE):
            keys = old[start : start + MOVED_AT_ONCE]
            self.put(keys[keys[:, 0] != EMPTY])
