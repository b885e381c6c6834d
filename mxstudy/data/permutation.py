"""Permutations of 0..n-1 by a pseudo-random function, computed at any index without a table."""

from __future__ import annotations

import numpy as np

FEISTEL_ROUNDS = 6
SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # the increment and factors of `mix`


def permute(index: np.ndarray, size: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Apply the permutation of 0..size-1 that belongs to (seed, epoch) to the indices; uint64 [n] in and out, no table.

    A Feistel network permutes the next power of four. A value outside 0..size-1 is permuted again until it is inside
    (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    half_bits = max((size - 1).bit_length() + 1, 2) // 2
    key = mix(mix(np.full_like(epoch, seed % 2**64)) ^ epoch)
    value = feistel(index, half_bits, key)
    while (outside := value >= size).any():
        value[outside] = feistel(value[outside], half_bits, key[outside])
    return value


def feistel(value: np.ndarray, half_bits: int, key: np.ndarray) -> np.ndarray:
    """Permute 0..4**half_bits-1 by a Feistel network, one permutation per key, uint64 [n] in and out."""
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = value >> bits, value & mask
    for number in range(FEISTEL_ROUNDS):
        round_key = mix(key + np.uint64(number))
        left, right = right, left ^ (mix(right ^ round_key) & mask)
    return (left << bits) | right


def mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's step and finaliser (Steele, Lea, Flood, 2014): a bijection of uint64, modulo 2**64."""
    increment, first, second = map(np.uint64, SPLITMIX)
    x = x + increment
    x = (x ^ (x >> np.uint64(30))) * first
    x = (x ^ (x >> np.uint64(27))) * second
    return x ^ (x >> np.uint64(31))
