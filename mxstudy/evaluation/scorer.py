"""Log-likelihoods of continuations under a native decoder: few tokens, full batches, log-softmax in FP32.

Requests that share a context share its forward. A row is one sequence, [context][branch][branch]...: a token reads the
context and its own branch before it, and a branch's positions go on where the context ends, as if it were alone there.
What is last of a continuation is only predicted, so a letter as an option has a branch without tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mxstudy.model.decoder import Decoder, Tree
from mxstudy.reader import ConfigError

Tokens = tuple[int, ...]

# Branches of one row, in tokens, unless its context is longer: the mask, of T x T, stays small, and where a context is
# repeated for further branches it is no more than half of the row.
LONGEST_BRANCHES = 256
LOGITS_AT_ONCE = 2**28  # 1 GiB in FP32


@dataclass(frozen=True)
class Request:
    """`continuation` is scored after `context`. Raises ConfigError where either is empty."""

    context: Tokens
    continuation: Tokens

    def __post_init__(self) -> None:
        if not self.context or not self.continuation:
            raise ConfigError(f"evaluation: {self}: both need a token at least")


@dataclass(frozen=True)
class Scored:
    """Sum of the continuation's log-probabilities; whether each of its tokens was the likeliest."""

    nats: float
    is_greedy: bool


class Branch(NamedTuple):
    """Continuations that differ in their last token at most: the tokens before it, then (place of request, token)."""

    tokens: Tokens
    lasts: list[tuple[int, int]]


class BatchRow(NamedTuple):
    context: Tokens
    branches: list[Branch]

    @property
    def length(self) -> int:
        return len(self.context) + sum(len(branch.tokens) for branch in self.branches)


class BatchPlan(NamedTuple):
    """`truncated`: how many requests lost their beginning."""

    batches: list[list[BatchRow]]
    truncated: int


def plan(requests: Sequence[Request], max_length: int, tokens_per_batch: int) -> BatchPlan:
    """Each request in one batch. No device is touched: batches may run anywhere, in any order."""
    groups: dict[Tokens, dict[Tokens, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    truncated = 0
    for place, request in enumerate(requests):
        whole = request.context + request.continuation
        truncated += len(whole) > max_length + 1
        whole = whole[-max_length - 1 :]
        start = max(len(whole) - len(request.continuation), 1)
        groups[whole[:start]][whole[start:-1]].append((place, whole[-1]))
    rows = [row for context, branches in groups.items() for row in rows_of(context, branches)]
    rows.sort(key=lambda row: row.length, reverse=True)
    return BatchPlan(list(batches(rows, tokens_per_batch)), truncated)


def rows_of(context: Tokens, branches: dict[Tokens, list[tuple[int, int]]]) -> Iterator[BatchRow]:
    """One, or as many as the branches need."""
    room = limit = max(LONGEST_BRANCHES, len(context))
    row = BatchRow(context, [])
    for tokens, lasts in branches.items():
        if row.branches and len(tokens) > room:
            yield row
            row, room = BatchRow(context, []), limit
        row.branches.append(Branch(tokens, lasts))
        room -= len(tokens)
    yield row


def batches(by_length: Iterable[BatchRow], tokens_per_batch: int) -> Iterator[list[BatchRow]]:
    """Neighbours of a list that is sorted by length, longest first, so that little is padded."""
    batch: list[BatchRow] = []
    for row in by_length:
        if batch and (len(batch) + 1) * batch[0].length > tokens_per_batch:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@dataclass
class Scorer:
    """`tokens_per_batch`: of a forward, padding included; a longer row goes alone.

    `max_length`: of what the model reads; a longer request loses its beginning, and is counted in `truncated`.
    """

    model: Decoder
    max_length: int
    tokens_per_batch: int
    truncated: int = 0

    def score(self, requests: Sequence[Request], done: Callable[[int], None] | None = None) -> list[Scored]:
        """In the order of the requests. `done` is told after each batch how many requests were in it."""
        planned = plan(requests, self.max_length, self.tokens_per_batch)
        self.truncated += planned.truncated
        scored: dict[int, Scored] = {}
        for found in self.run_all(planned.batches):
            scored.update(found)
            if done is not None:
                done(len(found))
        return [scored[place] for place in range(len(requests))]

    def run_all(self, batches: Sequence[Sequence[BatchRow]]) -> Iterator[list[tuple[int, Scored]]]:
        """What `run` finds in each batch; the order is free."""
        return map(self.run, batches)

    @torch.inference_mode()
    def run(self, batch: Sequence[BatchRow]) -> list[tuple[int, Scored]]:
        """(place, what was found there) of each request in the batch."""
        device, packed = self.model.tok_embeddings.weight.device, pack(batch)
        tokens_BT, row_P, column_P, wanted_P = (
            torch.from_numpy(ids).to(device)
            for ids in (packed.tokens_BT, packed.row_P, packed.column_P, packed.wanted_P)
        )
        features_BTD = self.model.features(tokens_BT, packed.tree(device))
        nats_P, greedy_P = self.predicted(features_BTD[row_P, column_P], wanted_P)
        nats, greedy = torch.stack((nats_P.double(), greedy_P.double())).cpu().numpy()  # all that is copied back
        sums, alls = np.add.reduceat(nats, packed.begins), np.minimum.reduceat(greedy, packed.begins) == 1
        return list(zip(packed.places, map(Scored, sums.tolist(), alls.tolist()), strict=True))

    def predicted(self, features_PD: Tensor, wanted_P: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities in FP32, and whether each is the likeliest token's. The head runs here alone."""
        at_once = max(1, LOGITS_AT_ONCE // self.model.config.vocab_size)
        nats, greedy = [], []
        for features, wanted in zip(features_PD.split(at_once), wanted_P.split(at_once), strict=True):
            log_probs_PV = self.model.output(features).float().log_softmax(-1)
            nats.append(log_probs_PV.gather(-1, wanted[:, None]).squeeze(-1))
            greedy.append(log_probs_PV.argmax(-1) == wanted)
        return torch.cat(nats), torch.cat(greedy)


class Packed(NamedTuple):
    """A batch as arrays: B rows padded to T tokens; P predictions, those of one request side by side.

    `branch_BT`: 0 in the context, -1 in the padding. A prediction, of `wanted_P`, reads the features at `row_P` and
    `column_P`. `begins`: where each request's predictions do; `places`: its place among all requests.
    """

    tokens_BT: np.ndarray
    branch_BT: np.ndarray
    position_BT: np.ndarray
    row_P: np.ndarray
    column_P: np.ndarray
    wanted_P: np.ndarray
    begins: np.ndarray
    places: list[int]

    def tree(self, device: torch.device) -> Tree | None:
        """Padding is a branch too, so that it has something to read. None where causal attention is the same."""
        if (self.position_BT == np.arange(self.position_BT.shape[1])).all():
            return None
        branch_BT, position_BT = (torch.from_numpy(ids).to(device) for ids in (self.branch_BT, self.position_BT))
        reader_BT1, read_B1T = branch_BT[:, :, None], branch_BT[:, None, :]
        return Tree(position_BT, ((read_B1T == 0) | (read_B1T == reader_BT1)).tril())


def pack(batch: Sequence[BatchRow]) -> Packed:
    """Python loops over segments, each a context or a branch; NumPy over their tokens, put end to end."""
    texts: list[Tokens] = []
    about: list[tuple[int, int, int, int]] = []  # of a segment: row, branch, first column, first position
    asked: list[tuple[int, int, int, Tokens]] = []  # of a request: place, segments of context and branch, continuation
    for number, row in enumerate(batch):
        context, column = len(texts), len(row.context)
        texts.append(row.context)
        about.append((number, 0, 0, 0))
        for branch, (tokens, lasts) in enumerate(row.branches, 1):
            asked += [(place, context, len(texts), (*tokens, last)) for place, last in lasts]
            texts.append(tokens)
            about.append((number, branch, column, len(row.context)))
            column += len(tokens)

    segment, offset, begins = ragged(texts)
    row_N, branch_N, column_N, position_N = np.array(about).T[:, segment]
    column_N, position_N = column_N + offset, position_N + offset
    tokens_BT = np.zeros((len(batch), column_N.max() + 1), np.int64)
    branch_BT = np.full_like(tokens_BT, -1)
    position_BT = np.zeros_like(tokens_BT) + np.arange(tokens_BT.shape[1])
    tokens_BT[row_N, column_N] = flat(texts)
    branch_BT[row_N, column_N] = branch_N
    position_BT[row_N, column_N] = position_N

    places, contexts, branches, continuations = zip(*asked, strict=True)
    request, offset, first = ragged(continuations)
    ends_context = begins[1:][np.array(contexts)[request]] - 1  # a continuation's first token is predicted there
    reads_P = np.where(offset == 0, ends_context, begins[np.array(branches)[request]] + offset - 1)
    row_P, column_P, wanted_P = row_N[reads_P], column_N[reads_P], flat(continuations)
    return Packed(tokens_BT, branch_BT, position_BT, row_P, column_P, wanted_P, first[:-1], list(places))


def flat(texts: Iterable[Tokens]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(texts), np.int64)


def ragged(texts: Sequence[Tokens]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of texts put end to end: each token's text, its number in it, and where the texts begin, with the end of all."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    begins = np.concatenate(([0], lengths.cumsum()))
    text = np.repeat(np.arange(len(texts)), lengths)
    return text, np.arange(len(text)) - begins[text], begins
