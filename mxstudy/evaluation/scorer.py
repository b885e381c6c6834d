"""Log-likelihoods of continuations under a native decoder: few forwards, full batches, log-softmax in FP32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mxstudy.model.decoder import Decoder

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """`continuation` is scored after `context`; neither may be empty."""

    context: Tokens
    continuation: Tokens


@dataclass(frozen=True)
class Scored:
    """Sum of the continuation's log-probabilities; whether each of its tokens was the likeliest."""

    nats: float
    is_greedy: bool


@dataclass
class Scorer:
    """`tokens_per_batch`: of a forward, padding included; a longer sequence goes alone.

    `max_length`: of what the model reads; a longer request loses its beginning, and is counted in `truncated`.
    """

    model: Decoder
    max_length: int
    tokens_per_batch: int
    truncated: int = 0

    @torch.inference_mode()
    def score(self, requests: Sequence[Request]) -> list[Scored]:
        """In the order of the requests. Requests whose inputs are equal, letters after one context, share a forward."""
        inputs = [self.input_of(request) for request in requests]
        places: dict[Tokens, list[int]] = {}
        for place, tokens in enumerate(inputs):
            places.setdefault(tokens, []).append(place)
        scored: list[Scored | None] = [None] * len(requests)
        for batch in batches(sorted(places, key=len, reverse=True), self.tokens_per_batch):
            features_BTD = self.model.features(padded(batch, self.device))
            rows = [(row, place) for row, tokens in enumerate(batch) for place in places[tokens]]
            for (row, place), result in zip(rows, self.results(features_BTD, batch, rows, requests), strict=True):
                assert inputs[place] == batch[row]
                scored[place] = result
        return [result for result in scored if result is not None]

    @property
    def device(self) -> torch.device:
        return self.model.tok_embeddings.weight.device

    def input_of(self, request: Request) -> Tokens:
        """All tokens but the last, which is only predicted."""
        whole = request.context + request.continuation
        self.truncated += len(whole) > self.max_length + 1
        return whole[-self.max_length - 1 : -1]

    def results(
        self, features_BTD: Tensor, batch: list[Tokens], rows: list[tuple[int, int]], requests: Sequence[Request]
    ) -> Iterator[Scored]:
        """The head runs where a continuation is predicted, and nowhere else."""
        targets = [requests[place].continuation for _, place in rows]
        positions = [
            (row, len(batch[row]) - len(target) + offset)
            for (row, _), target in zip(rows, targets, strict=True)
            for offset in range(len(target))
        ]
        where = torch.tensor(positions, device=self.device).T
        wanted_N = torch.tensor([token for target in targets for token in target], device=self.device)
        log_probs_NV = self.model.output(features_BTD[where[0], where[1]]).float().log_softmax(-1)
        nats_N = log_probs_NV.gather(-1, wanted_N[:, None]).squeeze(-1).double()
        greedy_N = log_probs_NV.argmax(-1) == wanted_N
        lengths = [len(target) for target in targets]
        for nats, greedy in zip(nats_N.cpu().split(lengths), greedy_N.cpu().split(lengths), strict=True):
            yield Scored(nats.sum().item(), bool(greedy.all()))


def batches(by_length: Sequence[Tokens], tokens_per_batch: int) -> Iterator[list[Tokens]]:
    """Neighbours of a list that is sorted by length, longest first, so that little is padded."""
    batch: list[Tokens] = []
    for tokens in by_length:
        if batch and (len(batch) + 1) * len(batch[0]) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(tokens)
    if batch:
        yield batch


def padded(batch: Sequence[Tokens], device: torch.device) -> Tensor:
    """[B, T] int64, zeros to the right: attention is causal, nothing looks at them."""
    length = max(map(len, batch))
    return torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens in batch], device=device)
