"""Batches of token windows: sample i of step s is a pure function of (data_seed, s, i).

Each split is cut into windows of T + 1 tokens at stride T, so that every token except the first is a target once; a
remainder shorter than a window is dropped. `mxstudy.data.sampling` says which corpus sample i of step s is taken from,
and that it is the n-th one taken from there. Epoch n // windows of a corpus visits every window once, in its own order;
a batch may span two epochs. Batches hold no state: to resume, only the step is needed, and each rank or micro-batch
computes its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mxstudy.config import Train
from mxstudy.data.permutation import permute
from mxstudy.data.sampling import Sampling, apportion
from mxstudy.data.shards import Shards, Tokens
from mxstudy.reader import require


class Batches:
    """Batches of both splits of the corpora of `sampling`; `shards`: those of each corpus, by its name.

    Raises ConfigError if a training split is shorter than one sequence.
    """

    def __init__(self, shards: Mapping[str, Shards], sampling: Sampling, sequence_length: int) -> None:
        self.sampling, self.sequence_length = sampling, sequence_length
        self.train_tokens = [shards[name].tokens("train") for name in sampling.corpora]
        self.validation_tokens = [shards[name].tokens("validation") for name in sampling.corpora]
        self.windows = [self.count_windows(tokens) for tokens in self.train_tokens]
        for name, tokens, windows in zip(sampling.corpora, self.train_tokens, self.windows, strict=True):
            require(
                windows > 0,
                f"train.sequence_length: the training split{self.of(name)} is shorter than one sequence: {len(tokens)} "
                f"tokens, but {sequence_length} + 1 are needed",
            )

    def train(self, step: int, start: int = 0, stop: int | None = None) -> tuple[Tensor, Tensor]:
        """Return rows start..stop of a step's global batch: tokens and targets, int64 [stop - start, T], on CPU."""
        rows = np.arange(self.sampling.batch_size)[start:stop]
        corpus_B, number_B = self.sampling.deal(step, rows)
        window_B = np.empty_like(number_B)
        for corpus in np.unique(corpus_B).tolist():
            own, windows = corpus_B == corpus, self.windows[corpus]
            epoch, position = np.divmod(number_B[own].astype(np.uint64), np.uint64(windows))
            window_B[own] = permute(position, windows, self.sampling.data_seed, epoch)
        found = zip(corpus_B.tolist(), window_B.tolist(), strict=True)
        return self.gather([(self.train_tokens[corpus], window) for corpus, window in found])

    def validation(self, sequences: int) -> tuple[Tensor, Tensor]:
        """Return windows of the validation splits: tokens and targets, int64 [sequences, T], on CPU.

        The sequences are shared among the corpora as the training's samples are, and spread evenly over each split.
        """
        found: list[tuple[Tokens, int]] = []
        for name, share in self.validation_shares(sequences).items():
            tokens = self.validation_tokens[self.sampling.corpora.index(name)]
            windows = self.count_windows(tokens)
            require(
                share <= windows,
                f"validation.sequences: {share} sequences of {self.sequence_length} tokens are more than the {windows} "
                f"that the validation split{self.of(name)} holds; ask for fewer, keep more text for it "
                "(data.validation_fraction), or name some of your files for it (data.validation_paths)",
            )
            found += [(tokens, window) for window in (np.arange(share) * windows // max(share, 1)).tolist()]
        return self.gather(found)

    def validation_shares(self, sequences: int) -> dict[str, int]:
        """Return how many of the validation's sequences are of each corpus."""
        return apportion(self.sampling.samples, sequences)

    def taken(self, step: int) -> dict[str, float]:
        """Return the tokens of each corpus in the steps before `step`, and how often they go through the corpus."""
        found: dict[str, float] = {}
        for (name, samples), windows in zip(self.sampling.samples_until(step).items(), self.windows, strict=True):
            found |= {f"{name}/tokens": samples * self.sequence_length, f"{name}/epochs": samples / windows}
        return found

    def of(self, name: str) -> str:
        return f" of {name}" if len(self.windows) > 1 else ""

    def count_windows(self, tokens: Tokens) -> int:
        return max(len(tokens) - 1, 0) // self.sequence_length

    def gather(self, chosen: Sequence[tuple[Tokens, int]]) -> tuple[Tensor, Tensor]:
        length = self.sequence_length
        tokens_BT, targets_BT = np.empty((2, len(chosen), length), dtype=np.int64)
        for row, (tokens, window) in enumerate(chosen):
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
