"""A native decoder as lm-eval sees a language model: it scores continuations, and needs no conversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from mxstudy.data.tokenizer import Tokenizer
from mxstudy.evaluation.scorer import Request, Scorer


class NativeLM(LM):
    """No BOS, as OLMES has it; contexts are never empty. `done`: told after each batch how many requests it scored."""

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
        """Each text once, however often it is asked for."""
        once = list(dict.fromkeys(texts))
        ids = dict(
            zip(once, (tuple(found.tolist()) for found in self.tokenizer_of_run.encode_batch(once)), strict=True)
        )
        return [ids[text] for text in texts]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("whole texts are not scored through lm-eval here")

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("continuations are scored here, not sampled; tasks that generate cannot run")


def split_at_words(context: str, continuation: str) -> tuple[str, str]:
    """Spaces at the context's end belong to the continuation, as in lm-eval: tokens begin with their space."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation
