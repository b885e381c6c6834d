"""Let lm-eval use a native decoder as its language model, without conversion; it only scores continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from mxstudy.data.tokenizer import Tokenizer
from mxstudy.evaluation.scorer import Request, Scorer


class NativeLM(LM):
    """lm-eval's model over a Scorer, without BOS as in OLMES; contexts must not be empty.

    `done` is called after each batch with the number of requests that were scored in it.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, done: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.scorer, self.tokenizer_of_run, self.done = scorer, tokenizer, done

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [split_at_words(*request.args) for request in requests]
        wholes = self.encode([context + continuation for context, continuation in pairs])
        contexts = self.encode([context for context, _ in pairs])
        asked = [
            Request(whole[: len(context)], whole[len(context) :])
            for whole, context in zip(wholes, contexts, strict=True)
        ]
        return [(scored.nats, scored.is_greedy) for scored in self.scorer.score(asked, self.done)]

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of each text; repeated texts are encoded once."""
        once = list(dict.fromkeys(texts))
        ids = dict(
            zip(once, (tuple(found.tolist()) for found in self.tokenizer_of_run.encode_batch(once)), strict=True)
        )
        return [ids[text] for text in texts]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("whole texts cannot be scored through lm-eval here; use the study perplexity")

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("tasks that generate text cannot run: continuations are only scored here")


def split_at_words(context: str, continuation: str) -> tuple[str, str]:
    """Move spaces at the context's end to the continuation, as lm-eval does: tokens begin with their space."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation
