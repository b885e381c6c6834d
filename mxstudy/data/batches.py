"""Batches of token windows: sample i of step s is a pure function of (data_seed, s, i).

Each split is cut into windows of T + 1 tokens at stride T, so that every token except the first is a target once; a
remainder shorter than a window is dropped. The samples of all steps are numbered consecutively, n = s * batch_size + i.
Epoch n // windows visits every window once, in its own order; a batch may span two epochs. Batches hold no state: to
resume, only the step is needed, and each rank or micro-batch computes its own rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mxstudy.config import Train
from mxstudy.data.shards import Shards, Tokens
from mxstudy.reader import require

FEISTEL_ROUNDS = 6


class Batches:
    """Batches of both splits of `shards`. Raises ConfigError if the training split is shorter than one sequence."""

    def __init__(self, shards: Shards, sequence_length: int, batch_size: int, data_seed: int) -> None:
        self.train_tokens = shards.tokens("train")
        self.validation_tokens = shards.tokens("validation")
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.data_seed = data_seed
        self.windows = self.count_windows(self.train_tokens)
        require(
            self.windows > 0,
            f"train.sequence_length: the training split is shorter than one sequence: {len(self.train_tokens)} tokens, "
            f"but {sequence_length} + 1 are needed",
        )

    def train(self, step: int, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Return rows start..stop of a step's global batch: tokens and targets, int64 [stop - start, T], on CPU."""
        rows = np.arange(self.batch_size, dtype=np.uint64)[start:stop]
        epoch, position = np.divmod(rows + np.uint64(step * self.batch_size), np.uint64(self.windows))
        return self.gather(self.train_tokens, permute(position, self.windows, self.data_seed, epoch))

    def validation(self, sequences: int) -> tuple[Tensor, Tensor]:
        """Return windows spread evenly over the validation split: tokens and targets, int64 [sequences, T], on CPU."""
        windows = self.count_windows(self.validation_tokens)
        require(
            sequences <= windows,
            f"validation.sequences: {sequences} sequences of {self.sequence_length} tokens are more than the {windows} "
            "that the validation split holds; ask for fewer or raise data.validation_fraction",
        )
        return self.gather(self.validation_tokens, np.arange(sequences) * windows // sequences)

    def count_windows(self, tokens: Tokens) -> int:
        return max(len(tokens) - 1, 0) // self.sequence_length

    def gather(self, tokens: Tokens, windows_B: np.ndarray) -> tuple[Tensor, Tensor]:
        length = self.sequence_length
        tokens_BT, targets_BT = np.empty((2, len(windows_B), length), dtype=np.int64)
        for row, window in enumerate(windows_B.tolist()):
            ids = tokens[window * length : (window + 1) * length + 1]
            tokens_BT[row], targets_BT[row] = ids[:-1], ids[1:]
        return torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT)


def rows_of_rank(train: Train, rank: int, world_size: int) -> range:
    """Return a rank's rows of the global batch.

    Raises ConfigError if the batch does not divide evenly over the ranks, or a rank's share into micro-batches.
    """
    share, rest = divmod(train.batch_size, world_size)
    require(rest == 0, f"train.batch_size: {train.batch_size} sequences do not divide over {world_size} ranks")
    micro = train.micro_batch_size
    require(
        share % (micro or share) == 0,
        f"train.micro_batch_size: the {share} sequences of each of {world_size} ranks do not divide into micro-batches "
        f"of {micro}; null takes them all at once",
    )
    return range(rank * share, (rank + 1) * share)


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
    """Permute 0..4**half_bits-1 by a Feistel network, one permutation per key; uint64 [n] in and out."""
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = value >> bits, value & mask
    for number in range(FEISTEL_ROUNDS):
        round_key = mix(key + np.uint64(number))
        left, right = right, left ^ (mix(right ^ round_key) & mask)
    return (left << bits) | right


def mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's step and finaliser (Steele, Lea, Flood, 2014): a bijection of uint64, modulo 2**64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
