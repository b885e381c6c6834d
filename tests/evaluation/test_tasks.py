"""lm-eval's own loop over our tasks and model gives the scores that one question at a time gives."""

from __future__ import annotations

import gc
import json
import math
from typing import Any

import pytest
import torch
from lm_eval.evaluator import evaluate

from mxstudy import config
from mxstudy.data.tokenizer import ByteTokenizer
from mxstudy.evaluation import suite
from mxstudy.evaluation.lm import NativeLM, split_at_words
from mxstudy.evaluation.scorer import Scorer
from mxstudy.evaluation.tasks import OlmesTask
from mxstudy.evaluation.templates import Question
from mxstudy.model.decoder import Decoder
from mxstudy.numerics.cast import BlockCast

pytestmark = pytest.mark.integration

QUESTIONS = [
    Question(("Question: What melts?\nAnswer:",) * 3, (" ice", " a rock", " \u00e9clair"), 0),
    Question(("Goal: go\nAnswer:",) * 2, (" run", " sit"), 1),
    Question(("Sam saw Sam", "Sam saw Max"), (" leave.",) * 2, 1),
    Question(("Ends in spaces:  ",) * 2, (" A", " B"), 0),
]


@pytest.fixture(scope="module")
def model() -> Decoder:
    shape = config.Decoder(hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=257)
    decoder = Decoder(shape, config.RMSNorm(), BlockCast(), torch.float32)
    decoder.init_weights(0)
    return decoder


def nats(model: Decoder, context: str, continuation: str) -> float:
    ids = [*(context + continuation).encode()]
    start = len(context.rstrip().encode())
    with torch.no_grad():
        log_probs = model(torch.tensor([ids[:-1]])).double().log_softmax(-1)[0]
    return sum(log_probs[place - 1, ids[place]].item() for place in range(start, len(ids)))


def by_hand(model: Decoder, question: Question, metric: str) -> bool:
    scores = []
    for context, continuation in zip(question.contexts, question.continuations, strict=True):
        score = nats(model, context, continuation)
        if metric == "uncond":
            score -= nats(model, "Answer:", continuation)
        scores.append(score / {"per_char": len(continuation), "per_byte": len(continuation.encode())}.get(metric, 1))
    return max(range(len(scores)), key=scores.__getitem__) == question.gold


def results_of(model: Decoder, metric: str) -> Any:
    lm = NativeLM(Scorer(model, 128, 256), ByteTokenizer())
    task = OlmesTask("quiz", metric, QUESTIONS)
    return evaluate(lm, {"tasks": {"quiz": task}, "groups": {}, "group_map": {}}, bootstrap_iters=100)


@pytest.mark.parametrize("metric", ["raw", "per_char", "per_byte", "uncond"])
def test_scores_are_those_of_one_question_at_a_time(model: Decoder, metric: str) -> None:
    found = results_of(model, metric)
    right = [by_hand(model, question, metric) for question in QUESTIONS]
    assert [sample["acc"] for sample in found["samples"]["quiz"]] == right
    assert found["results"]["quiz"]["acc,none"] == sum(right) / 4
    bits = [
        -nats(model, q.contexts[q.gold], q.continuations[q.gold]) / math.log(2) / len(q.continuations[q.gold])
        for q in QUESTIONS
    ]
    assert found["results"]["quiz"]["bits_per_char,none"] == pytest.approx(sum(bits) / 4, abs=1e-4)
    for sample, question in zip(found["samples"]["quiz"], QUESTIONS, strict=True):
        assert sample["target"] == question.continuations[question.gold]
        assert len(sample["filtered_resps"]) == len(question.continuations) * (2 if metric == "uncond" else 1)
    json.dumps(found["samples"])


def test_a_nan_is_named(model: Decoder) -> None:
    task = OlmesTask("quiz", "raw", QUESTIONS)
    with pytest.raises(ValueError, match="NaN"):
        task.process_results(task.test_docs()[1], [(math.nan, False), (-1.0, False)])


def test_spaces_go_to_the_continuation() -> None:
    assert split_at_words("a b ", " c") == ("a b", "  c")
    assert split_at_words("a b", " c") == ("a b", " c")


def test_what_generates_is_refused(model: Decoder) -> None:
    lm = NativeLM(Scorer(model, 128, 256), ByteTokenizer())
    with pytest.raises(NotImplementedError, match="only scored here"):
        lm.generate_until([])


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_searched_for_while_questions_are_answered(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    seen: list[bool] = []

    def broken(*_: Any, **__: Any) -> Any:
        seen.append(gc.isenabled())
        raise RuntimeError

    monkeypatch.setattr(suite, "evaluate", broken)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError):
            suite.samples_of(NativeLM(Scorer(model, 128, 256), ByteTokenizer()), "piqa", "cf", {"piqa": QUESTIONS})
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()
