"""Our language model agrees with lm-eval's own, on the same weights as transformers' Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from quiz import ROWS
from random_decoder import random_decoder

from mxstudy import config
from mxstudy.data.tokenizer import ByteTokenizer
from mxstudy.evaluation.hugging_face import export
from mxstudy.evaluation.lm import NativeLM, split_at_words
from mxstudy.evaluation.olmes import TASKS
from mxstudy.evaluation.scorer import Scorer
from mxstudy.evaluation.tasks import OlmesTask
from mxstudy.model.decoder import Decoder

MAX_LENGTH = 256
RMSNORM = config.RMSNorm()
OTHER_ROWS: dict[str, list[dict[str, Any]]] = {
    "arc_easy": [
        {
            "question": "Na\u00efve birds eat?",
            "choices": {"text": ["seeds", "seed", "caf\u00e9s"], "label": list("ABC")},
            "answerKey": "B",
        }
    ],
    "openbookqa": [
        {
            "question_stem": "Trees need  ",
            "choices": {"text": ["light", "lights", "no light at all"], "label": list("ABC")},
            "answerKey": "C",
        }
    ],
    "winogrande": [{"sentence": "Kim saw Lee, so _ ran home.", "option1": "Kim", "option2": "Lee", "answer": "2"}],
}


def decoder() -> Decoder:
    shape = config.Decoder(
        hidden_size=64, ffn_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=257, init="mitchell"
    )
    return random_decoder(shape, RMSNORM, seed=1)


def results_of(lm: Any, form: str) -> Any:
    tasks = {}
    for name, task in TASKS.items():
        questions = [task.template.question(row, form) for row in [ROWS[name], *OTHER_ROWS.get(name, [])]]
        tasks[name] = OlmesTask(name, task.metric_of(form), questions)
    return evaluate(lm, {"tasks": tasks, "groups": {}, "group_map": {}}, bootstrap_iters=0)


@pytest.mark.integration
@pytest.mark.parametrize("form", ["cf", "mcf"])
def test_every_task_is_scored_as_lm_evals_own_model_does(form: str, tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = decoder()
    export(model, RMSNORM, ByteTokenizer(), MAX_LENGTH, tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = results_of(
        HFLM(exported, tokenizer=tokenizer, softmax_dtype="float32", add_bos_token=False, batch_size=4), form
    )
    ours = results_of(NativeLM(Scorer(model, MAX_LENGTH, 2000), ByteTokenizer()), form)
    for name in TASKS:
        for own, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            nats, greedy = zip(*own["filtered_resps"], strict=True)
            their_nats, their_greedy = zip(*other["filtered_resps"], strict=True)
            assert nats == pytest.approx(their_nats, abs=1e-3)
            assert greedy == their_greedy
        assert ours["results"][name]["acc,none"] == theirs["results"][name]["acc,none"]


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []

    def encode_batch(self, texts: list[str]) -> Any:
        self.batches.append(texts)
        return super().encode_batch(texts)


def test_a_text_is_tokenised_once() -> None:
    tokenizer, told = CountingTokenizer(), []
    lm = NativeLM(Scorer(decoder(), MAX_LENGTH, 2000), tokenizer, told.append)
    pairs = [("Q: who?", " me"), ("Q: who?", " you"), ("Answer:", " me"), ("Q: who?", " me")]
    found = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    assert tokenizer.batches == [["Q: who?", "Answer:", " me", " you"]]
    assert found[0] == found[3] != found[1]
    assert told == [4]


class Looking(CountingTokenizer):
    """A tokenizer whose words may go on after a space."""

    splits_at_spaces = False


@pytest.mark.parametrize(
    ("tokenizer", "pair", "encoded"),
    [
        (CountingTokenizer(), ("Who? ", "me"), ["Who?", " me"]),
        (CountingTokenizer(), ("Wh", "o? me"), ["Wh", "Who? me"]),
        (Looking(), ("Who?", " me"), ["Who?", "Who? me"]),
    ],
)
def test_a_continuation_is_tokenised_without_its_context_only_where_that_is_the_same(
    tokenizer: CountingTokenizer, pair: tuple[str, str], encoded: list[str]
) -> None:
    lm = NativeLM(Scorer(decoder(), MAX_LENGTH, 2000), tokenizer)
    bare = encoded[0]
    (found,) = lm.tokenised([split_at_words(*pair)])
    assert found == (tuple(bare.encode()), tuple("".join(pair)[len(bare) :].encode()))
    assert tokenizer.batches == [encoded]
