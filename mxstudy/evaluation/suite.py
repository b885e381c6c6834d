"""Run tasks through lm-eval, and compute scores from the log-likelihoods of every question's options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from mxstudy.evaluation.lm import NativeLM
from mxstudy.evaluation.olmes import TASKS
from mxstudy.evaluation.tasks import OlmesTask
from mxstudy.evaluation.templates import Question
from mxstudy.garbage import without_garbage_collection

MEASURES = ("right", "bits_per_char")  # columns with one number per question
TRUNCATED = "truncated_requests"


class Mean(NamedTuple):
    value: float
    stderr: float


def count_requests(task: str, form: str, asked: Mapping[str, Sequence[Question]]) -> int:
    """Return the number of log-likelihoods that `samples_of` needs."""
    options = sum(len(question.continuations) for questions in asked.values() for question in questions)
    return options * (2 if TASKS[task].metric_of(form) == "uncond" else 1)


def samples_of(lm: LM, task: str, form: str, asked: Mapping[str, Sequence[Question]]) -> pd.DataFrame:
    """Score one task in one form and return one row per question.

    Columns: task, form, group (the task or one of its subjects), document, contexts, continuations, gold, shots (the
    numbers of their rows), nats, alone (unconditional nats, if the metric needs them), right, bits_per_char, and
    truncated_requests, the total of all rows.
    `asked`: questions by group. Raises ValueError if a log-likelihood is NaN.
    """
    metric = TASKS[task].metric_of(form)
    by_name = {group: OlmesTask(group, metric, questions) for group, questions in asked.items()}
    before = truncated_by(lm)
    with without_garbage_collection():
        found = evaluate(lm, {"tasks": by_name, "groups": {}, "group_map": {}}, bootstrap_iters=0)
    answers = ((group, sample) for group in by_name for sample in found["samples"][group])
    rows = [row_of(group, by_name[group].question_of(sample["doc"]), sample) for group, sample in answers]
    samples = pd.DataFrame(rows)
    return samples.assign(**{"task": task, "form": form, TRUNCATED: truncated_by(lm) - before})


def truncated_by(lm: LM) -> int:
    """Return how many requests were longer than the model's input; lm-eval's own models do not count them (0)."""
    return lm.scorer.truncated if isinstance(lm, NativeLM) else 0


def row_of(group: str, question: Question, sample: dict[str, Any]) -> dict[str, Any]:
    nats = [nats for nats, _ in sample["filtered_resps"]]
    options = len(question.continuations)
    return {
        "group": group,
        "document": sample["doc_id"],
        "contexts": list(dict.fromkeys(question.contexts)),
        "continuations": list(question.continuations),
        "gold": question.gold,
        "shots": list(question.shots),
        "nats": nats[:options],
        "alone": nats[options:],
        "right": sample["acc"],
        "bits_per_char": sample["bits_per_char"],
    }


def scores_of(samples: pd.DataFrame) -> pd.DataFrame:
    """Return one row per task and form: score and bits_per_char with standard errors, the score of guessing,
    documents, truncated requests, and whether it is the task's best form (mcf if both are equal, as in OLMES).

    Rows of averages follow, per form and over the best forms; they leave out tasks with subjects. `samples`: rows of
    `samples_of` for any tasks and forms.
    """
    rows = [
        {"task": task, "form": form, **measured(own), "documents": len(own), TRUNCATED: own[TRUNCATED].iloc[0]}
        for (task, form), own in samples.groupby(["task", "form"], sort=False)
    ]
    scores = pd.DataFrame(rows)
    best = scores.sort_values("form", ascending=False, kind="stable").groupby("task")["score"].idxmax()
    scores["best"] = scores.index.isin(best)
    return pd.concat([scores, *averages(scores)], ignore_index=True)


def values_of(scores: pd.DataFrame) -> dict[str, float]:
    """Return the scores as values of a journal's row or MLflow, by names like 'arc_easy.cf/score', without NaN."""
    measures = ("score", "stderr", "chance", "bits_per_char", "bits_per_char_stderr")
    return {
        f"{row['task'].replace(' ', '_')}.{row['form']}/{measure}": row[measure]
        for row in scores.to_dict("records")
        for measure in measures
        if not math.isnan(row[measure])
    }


def measured(samples: pd.DataFrame) -> dict[str, float]:
    right, bits = (mean_of(samples, measure) for measure in MEASURES)
    return {
        "score": right.value,
        "stderr": right.stderr,
        "chance": mean_of(samples.assign(guessed=1 / samples["continuations"].map(len)), "guessed").value,
        "bits_per_char": bits.value,
        "bits_per_char_stderr": bits.stderr,
    }


def mean_of(samples: pd.DataFrame, measure: str) -> Mean:
    """Return the mean over questions; with several groups (subjects), the mean of the groups' means."""
    groups = samples.groupby("group")[measure]
    return mean_of_means([Mean(*one) for one in zip(groups.mean(), groups.sem(), strict=True)])


def mean_of_means(means: Sequence[Mean]) -> Mean:
    """Return the unweighted mean of independent means, with its standard error."""
    stderr = math.sqrt(sum(mean.stderr**2 for mean in means)) / len(means)
    return Mean(sum(mean.value for mean in means) / len(means), stderr)


def averages(scores: pd.DataFrame) -> list[pd.DataFrame]:
    single = scores[[TASKS[task].subjects is None for task in scores["task"]]]
    choices = {form: own for form, own in single.groupby("form", sort=False) if own["task"].nunique() > 1}
    if len(choices) > 1:
        choices["best"] = single[single["best"]]
    return [average(form, own) for form, own in choices.items()]


def average(form: str, scores: pd.DataFrame) -> pd.DataFrame:
    pairs = [("score", "stderr"), ("bits_per_char", "bits_per_char_stderr")]
    means = {
        names: mean_of_means([Mean(*one) for one in scores[list(names)].itertuples(index=False)]) for names in pairs
    }
    values = {name: value for names, mean in means.items() for name, value in zip(names, mean, strict=True)}
    row = {"task": f"average of {len(scores)}", "form": form, **values, "chance": scores["chance"].mean()}
    row |= {name: scores[name].sum() for name in ("documents", TRUNCATED)}
    return pd.DataFrame([row | {"best": form == "best"}])
