"""Log-likelihoods of continuations under a native decoder: few tokens, full batches, log-softmax in FP32.

Requests with the same context share its forward. A row is one sequence, [context][branch][branch]...: a token attends
to the context and to the earlier tokens of its own branch, and each branch's positions continue from the end of the
context, as if it were the only branch. The last token of a continuation is only predicted, never read, so an option
that is a single letter has a branch without tokens.
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

from mxstudy.host_copies import to_device, to_host
from mxstudy.model.decoder import Decoder, Tree
from mxstudy.reader import ConfigError

Tokens = tuple[int, ...]

# Largest number of branch tokens in one row, unless its context is longer: the T x T mask stays small, and a context
# that is repeated for further branches takes at most half of the row.
LONGEST_BRANCHES = 256
LOGITS_AT_ONCE = 2**28  # 1 GiB in FP32
# A batch of so many tokens is worth a forward of its own, and ends where the next row is shorter by a fifth. Of OLMES'
# tasks, a fifth of the tokens is then padding; in batches as large as memory allows, more than half would be.
WORTH_A_FORWARD = 2**13


@dataclass(frozen=True)
class Request:
    """A `continuation` to be scored after `context`. Raises ConfigError if either is empty."""

    context: Tokens
    continuation: Tokens

    def __post_init__(self) -> None:
        if not self.context or not self.continuation:
            raise ConfigError(f"evaluation: {self}: context and continuation need at least one token each")


@dataclass(frozen=True)
class Scored:
    """`nats`: sum of a continuation's log-probabilities. `is_greedy`: whether each of its tokens was likeliest."""

    nats: float
    is_greedy: bool


Found = list[tuple[int, Scored]]  # index of the request, its score


class Branch(NamedTuple):
    """Continuations that differ at most in their last token.

    `tokens`: those before it. `lasts`: (index of the request, last token) of each.
    """

    tokens: Tokens
    lasts: list[tuple[int, int]]


class BatchRow(NamedTuple):
    context: Tokens
    branches: list[Branch]

    @property
    def length(self) -> int:
        return len(self.context) + sum(len(branch.tokens) for branch in self.branches)


class BatchPlan(NamedTuple):
    """Batches of rows. `truncated`: number of requests that lost their beginning."""

    batches: list[list[BatchRow]]
    truncated: int


def plan(requests: Sequence[Request], max_length: int, tokens_per_batch: int) -> BatchPlan:
    """Assign each request to one batch. No device is used: batches may run anywhere, in any order."""
    groups: dict[Tokens, dict[Tokens, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    truncated = 0
    for index, request in enumerate(requests):
        context, continuation = request.context, request.continuation
        if len(context) + len(continuation) > max_length + 1:
            truncated += 1
            whole = (context + continuation)[-max_length - 1 :]
            start = max(len(whole) - len(continuation), 1)
            context, continuation = whole[:start], whole[start:]
        groups[context][continuation[:-1]].append((index, continuation[-1]))
    rows = [row for context, branches in groups.items() for row in rows_of(context, branches)]
    rows.sort(key=lambda row: row.length, reverse=True)
    return BatchPlan(list(batches(rows, tokens_per_batch)), truncated)


def rows_of(context: Tokens, branches: dict[Tokens, list[tuple[int, int]]]) -> Iterator[BatchRow]:
    """Yield the rows of a context: one, or as many as its branches need."""
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
    """Yield batches of neighbouring rows; `by_length` is sorted by length, longest first, to keep the padding small."""
    batch: list[BatchRow] = []
    for row in by_length:
        longest = batch[0].length if batch else 0
        is_full = (len(batch) + 1) * longest > tokens_per_batch
        if batch and (is_full or (len(batch) * longest >= WORTH_A_FORWARD and row.length < 0.8 * longest)):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@dataclass
class Scorer:
    """Scores requests. `tokens_per_batch`: tokens of a forward, padding included; a longer row runs alone.

    `max_length`: tokens that the model reads at most; a longer request loses its beginning and is counted in
    `truncated`.
    """

    model: Decoder
    max_length: int
    tokens_per_batch: int
    truncated: int = 0

    def score(self, requests: Sequence[Request], done: Callable[[int], None] | None = None) -> list[Scored]:
        """Return the scores in the order of the requests; call `done` after each batch with its number of requests."""
        planned = plan(requests, self.max_length, self.tokens_per_batch)
        self.truncated += planned.truncated
        scored: dict[int, Scored] = {}
        for found in self.run_all(planned.batches):
            scored.update(found)
            if done is not None:
                done(len(found))
        return [scored[index] for index in range(len(requests))]

    def run_all(self, batches: Sequence[Sequence[BatchRow]]) -> Iterator[Found]:
        """Yield what `run` returns for each batch, in any order."""
        before: Callable[[], Found] | None = None
        for batch in batches:
            begun = self.begin(batch)
            if before is not None:
                yield before()
            before = begun
        if before is not None:
            yield before()

    def run(self, batch: Sequence[BatchRow]) -> Found:
        """Return (index of the request, its score) for each request in the batch."""
        return self.begin(batch)()

    @torch.inference_mode()
    def begin(self, batch: Sequence[BatchRow]) -> Callable[[], Found]:
        """Launch a batch, and return the function that waits for it and returns its scores.

        So a GPU works on a batch while the host prepares the next one.
        """
        device, packed = self.model.tok_embeddings.weight.device, pack(batch)
        tokens_BT, row_P, column_P, wanted_P = (
            to_device(torch.from_numpy(ids), device)
            for ids in (packed.tokens_BT, packed.row_P, packed.column_P, packed.wanted_P)
        )
        features_BTD = self.model.features(tokens_BT, packed.tree(device))
        nats_P, greedy_P = self.predicted(features_BTD[row_P, column_P], wanted_P)
        wait = to_host(torch.stack((nats_P.double(), greedy_P.double())))  # the only copy to the CPU

        def found() -> Found:
            nats, greedy = wait().numpy()
            sums, alls = np.add.reduceat(nats, packed.begins), np.minimum.reduceat(greedy, packed.begins) == 1
            return list(zip(packed.indices, map(Scored, sums.tolist(), alls.tolist()), strict=True))

        return found

    def predicted(self, features_PD: Tensor, wanted_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return the wanted tokens' log-probabilities, FP32 [P], and whether each is the likeliest token, bool [P].

        The output head runs only here, for the P features that predict something.
        """
        at_once = max(1, LOGITS_AT_ONCE // self.model.config.vocab_size)
        nats, greedy = [], []
        for features, wanted in zip(features_PD.split(at_once), wanted_P.split(at_once), strict=True):
            log_probs_PV = self.model.output(features).float().log_softmax(-1)
            nats.append(log_probs_PV.gather(-1, wanted[:, None]).squeeze(-1))
            greedy.append(log_probs_PV.argmax(-1) == wanted)
        return torch.cat(nats), torch.cat(greedy)


class Packed(NamedTuple):
    """A batch as arrays: B rows padded to T tokens, and P predictions, those of one request next to each other.

    `branch_BT`: number of the branch, 0 in the context, -1 in the padding. The token `wanted_P` is predicted from the
    features at `row_P`, `column_P`. `begins`: index of each request's first prediction. `indices`: of each request
    among all requests.
    """

    tokens_BT: np.ndarray
    branch_BT: np.ndarray
    position_BT: np.ndarray
    row_P: np.ndarray
    column_P: np.ndarray
    wanted_P: np.ndarray
    begins: np.ndarray
    indices: list[int]

    def tree(self, device: torch.device) -> Tree | None:
        """Return positions and attention mask of the batch, or None if plain causal attention is the same.

        Padding counts as a branch, so that its tokens attend to something.
        """
        if (self.position_BT == np.arange(self.position_BT.shape[1])).all():
            return None
        branch_BT, position_BT = (
            to_device(torch.from_numpy(ids), device) for ids in (self.branch_BT, self.position_BT)
        )
        reader_BT1, read_B1T = branch_BT[:, :, None], branch_BT[:, None, :]
        return Tree(position_BT, ((read_B1T == 0) | (read_B1T == reader_BT1)).tril())


def pack(batch: Sequence[BatchRow]) -> Packed:
    """Return the batch as arrays; Python loops over segments (contexts and branches), NumPy over their tokens."""
    texts: list[Tokens] = []
    about: list[tuple[int, int, int, int]] = []  # per segment: row, branch, first column, first position
    asked: list[tuple[int, int, int, Tokens]] = []  # per request: index, its two segments, continuation
    for number, row in enumerate(batch):
        context, column = len(texts), len(row.context)
        texts.append(row.context)
        about.append((number, 0, 0, 0))
        for branch, (tokens, lasts) in enumerate(row.branches, 1):
            asked += [(index, context, len(texts), (*tokens, last)) for index, last in lasts]
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

    indices, contexts, branches, continuations = zip(*asked, strict=True)
    request, offset, first = ragged(continuations)
    ends_context = begins[1:][np.array(contexts)[request]] - 1  # a continuation's first token is predicted here
    reads_P = np.where(offset == 0, ends_context, begins[np.array(branches)[request]] + offset - 1)
    row_P, column_P, wanted_P = row_N[reads_P], column_N[reads_P], flat(continuations)
    return Packed(tokens_BT, branch_BT, position_BT, row_P, column_P, wanted_P, first[:-1], list(indices))


def flat(texts: Iterable[Tokens]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(texts), np.int64)


def ragged(texts: Sequence[Tokens]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for concatenated texts, each token's text and index in it, and all texts' offsets, the end included."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    begins = np.concatenate(([0], lengths.cumsum()))
    text = np.repeat(np.arange(len(texts)), lengths)
    return text, np.arange(len(text)) - begins[text], begins
