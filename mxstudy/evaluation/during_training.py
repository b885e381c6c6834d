"""Evaluation of a model that is being trained: eager, without gradients, and leaving nothing behind.

It is asked as its checkpoint would be (`mxstudy.model.precision.for_evaluation`), not as it is trained and validated.
Where the model has no answer but NaN there are no scores.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import torch

from mxstudy import config
from mxstudy.data.tokenizer import Tokenizer
from mxstudy.evaluation import questions
from mxstudy.evaluation.lm import NativeLM
from mxstudy.evaluation.metrics import NotANumber
from mxstudy.evaluation.scorer import Scorer
from mxstudy.evaluation.suite import samples_of, scores_of, values_of
from mxstudy.model.decoder import Decoder
from mxstudy.model.precision import evaluated


def build_evaluation(
    settings: config.EvaluationDuringTraining, model: Decoder, tokenizer: Tokenizer, max_length: int
) -> Callable[[], dict[str, float]]:
    """What asks the model as it is, and gives back its scores by name."""
    asked = [
        (task, form, questions.build_questions(task, form, settings))
        for task in questions.at_hand(settings, print)
        for form in settings.forms
    ]

    @torch.compiler.set_stance("force_eager")  # blocks compiled for other shapes would not be those of the training
    def evaluate() -> dict[str, float]:
        lm = NativeLM(Scorer(model, max_length, settings.tokens_per_batch), tokenizer)
        try:
            with evaluated(model):
                return values_of(scores_of(pd.concat([samples_of(lm, *one) for one in asked])))
        except NotANumber as error:  # whether the training diverges is for its next loss to say
            print(f"evaluation: no scores: {error}", flush=True)
            return {}
        finally:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()  # a run's peak is that of its steps

    return evaluate
