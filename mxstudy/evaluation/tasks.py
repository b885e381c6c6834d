"""OLMES questions as lm-eval tasks, with the metrics acc and bits per character of the right option."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from lm_eval.api.instance import Instance

from mxstudy.compat.lm_eval import NamedTask
from mxstudy.evaluation.metrics import UNCONDITIONAL, bits_per_char, is_right
from mxstudy.evaluation.templates import Question

Answer = tuple[float, bool]  # lm-eval's answer: log-likelihood in nats, whether it is greedy


class OlmesTask(NamedTask):
    """A task of lm-eval. `name`: its name in the results. `metric`: the entry of METRICS that decides `acc`.

    A question's contexts already contain shots and description, so that lm-eval adds nothing. A document is no more
    than its question's number, because lm-eval writes each as JSON and hashes it.
    """

    VERSION = 1
    OUTPUT_TYPE = "loglikelihood"

    def __init__(self, name: str, metric: str, questions: Sequence[Question]) -> None:
        super().__init__(name, self.OUTPUT_TYPE)
        self.metric = metric
        self.questions = questions

    def download(self, *_: Any, **__: Any) -> None:
        """Do nothing: the questions are already loaded."""

    def has_training_docs(self) -> bool:
        return False

    def has_validation_docs(self) -> bool:
        return False

    def has_test_docs(self) -> bool:
        return True

    def test_docs(self) -> list[dict[str, Any]]:
        return [{"question": number} for number in range(len(self.questions))]

    def question_of(self, doc: dict[str, Any]) -> Question:
        return self.questions[doc["question"]]

    def doc_to_text(self, doc: dict[str, Any]) -> str:
        question = self.question_of(doc)
        return question.contexts[question.gold]

    def doc_to_target(self, doc: dict[str, Any]) -> str:
        question = self.question_of(doc)
        return question.continuations[question.gold]

    def fewshot_context(self, doc: dict[str, Any], num_fewshot: int, **_: Any) -> str:
        return self.doc_to_text(doc)

    def all_requests(self, rank: int, world_size: int) -> Iterator[Instance]:
        """Yield the requests of all documents of that rank, in order."""
        for number, doc in self.doc_iterator(rank=rank, world_size=world_size):
            yield from self.construct_requests(doc, "", metadata=(self.config.task, number, 1))

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> list[Instance]:
        """Return one request per option, and for `uncond` one more each: the continuation without the question."""
        question = self.question_of(doc)
        pairs = list(zip(question.contexts, question.continuations, strict=True))
        if self.metric == "uncond":
            pairs += [(UNCONDITIONAL, continuation) for continuation in question.continuations]
        return [
            Instance("loglikelihood", doc, pair, idx, metadata=kwargs["metadata"]) for idx, pair in enumerate(pairs)
        ]

    def process_results(self, doc: dict[str, Any], results: Sequence[Answer]) -> dict[str, float]:
        """Return acc and bits_per_char of one question. Raises ValueError, quoting the question, for a NaN."""
        question = self.question_of(doc)
        nats, options = [nats for nats, _ in results], len(question.continuations)
        right = is_right(self.metric, question, nats[:options], nats[options:])
        return {"acc": float(right), "bits_per_char": bits_per_char(question, nats[:options])}

    def aggregation(self) -> dict[str, Callable[[list[float]], float]]:
        return {"acc": fmean, "bits_per_char": fmean}

    def higher_is_better(self) -> dict[str, bool]:
        return {"acc": True, "bits_per_char": False}
