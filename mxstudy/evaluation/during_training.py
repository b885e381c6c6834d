"""Evaluate a model during its training: eagerly, without gradients, and without any effect on the training.

The model computes as its checkpoint would (`mxstudy.model.precision.for_evaluation`), not as in training and
validation. If its log-likelihoods are NaN, there are no scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from mxstudy import config
from mxstudy.data.tokenizer import Tokenizer
from mxstudy.evaluation import questions
from mxstudy.evaluation.beside_training import beside_training
from mxstudy.evaluation.lm import NativeLM
from mxstudy.evaluation.metrics import NotANumber
from mxstudy.evaluation.scorer import Scorer
from mxstudy.evaluation.suite import count_requests, samples_of, scores_of, values_of
from mxstudy.evaluation.templates import Question
from mxstudy.model.decoder import Decoder


def build_evaluation(
    settings: config.EvaluationDuringTraining,
    model: Decoder,
    tokenizer: Tokenizer,
    max_length: int,
    tell: Callable[[str, int, int], None],
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the model in its current state and returns its scores by name.

    `tell` is called after each batch with the task, and with how many requests of all tasks are done, of how many.
    """
    asked = [
        (task, form, questions.build_questions(task, form, settings))
        for task in questions.at_hand(settings, print)
        for form in settings.forms_of(task)
    ]
    total = sum(count_requests(*one) for one in asked)

    def evaluate() -> dict[str, float]:
        scorer, done = Scorer(model, max_length, settings.tokens_per_batch), 0

        def answers(task: str, form: str, groups: Mapping[str, Sequence[Question]]) -> pd.DataFrame:
            def count(requests: int) -> None:
                nonlocal done
                done += requests
                tell(f"evaluation: {task} {form}", done, total)

            return samples_of(NativeLM(scorer, tokenizer, count), task, form, groups)

        try:
            with beside_training(model):
                return values_of(scores_of(pd.concat([answers(*one) for one in asked])))
        except NotANumber as error:  # the next training loss decides whether the run has diverged
            print(f"evaluation: no scores: {error}", flush=True)
            return {}

    return evaluate
