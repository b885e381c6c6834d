"""Let lm-eval use a native decoder as its language model, without conversion; it only scores continuations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, starmap

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from mxstudy.data.tokenizer import Tokenizer
from mxstudy.evaluation.scorer import Request, Scorer, Tokens


class NativeLM(LM):
    """lm-eval's model over a Scorer, without BOS as in OLMES; contexts must not be empty.

    `done` is called after each batch with the number of requests that were scored in it.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, done: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.scorer, self.tokenizer_of_run, self.done = scorer, tokenizer, done

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [split_at_words(*request.args) for request in requests]
        asked = list(starmap(Request, self.tokenised(pairs)))
        return [(scored.nats, scored.is_greedy) for scored in self.scorer.score(asked, self.done)]

    def tokenised(self, pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[Tokens, Tokens]]:
        """Yield the tokens of each context, and those that follow them in context and continuation together.

        Where the tokenizer splits every text before a space, the continuation's own tokens are the latter.
        """
        apart = self.tokenizer_of_run.splits_at_spaces
        alone = [apart and continuation.startswith(" ") for _, continuation in pairs]
        others = [rest if own else context + rest for (context, rest), own in zip(pairs, alone, strict=True)]
        ids = self.encode(chain((context for context, _ in pairs), others))
        for (context, _), other, own in zip(pairs, others, alone, strict=True):
            before, found = ids[context], ids[other]
            yield (before, found) if own else (found[: len(before)], found[len(before) :])

    def encode(self, texts: Iterable[str]) -> dict[str, Tokens]:
        """Return the token ids by text; repeated texts are encoded once."""
        once = list(dict.fromkeys(texts))
        found = (tuple(ids.tolist()) for ids in self.tokenizer_of_run.encode_batch(once))
        return dict(zip(once, found, strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("whole texts cannot be scored through lm-eval here; use the study perplexity")

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("tasks that generate text cannot run: continuations are only scored here")


def split_at_words(context: str, continuation: str) -> tuple[str, str]:
    """Move spaces at the context's end to the continuation, as lm-eval does: tokens begin with their space."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation
