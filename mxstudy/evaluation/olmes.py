"""The ten OLMES tasks: data set, number of documents, metric and prompts of each (OLMES, arXiv 2406.08446).

RACE is an eleventh, which is not in OLMES: the MXFP8 recipe's list of nine has it, here in the others' cloze form.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mxstudy.evaluation import templates
from mxstudy.evaluation.templates import Template

TRAIN = "train"
SUBSET_SEED, SUBSET_SIZE, SUBSET_ABOVE = 1234, 1000, 1500


@dataclass(frozen=True)
class Task:
    """A task. `path`, `name`, `split`: of its data set on the Hugging Face hub; `revision`: the branch if not main.

    `metric`: the metric of the cloze form; multiple choice always uses `raw`. `subjects`: the column that divides the
    task into subjects whose scores are averaged; such a task is never reduced to a subset, and its shots are the first
    rows of `shots_split`. Those of other tasks are drawn from it.
    """

    path: str
    name: str | None
    split: str
    metric: str
    template: Template
    subjects: str | None = None
    shots_split: str = TRAIN
    revision: str | None = None

    def metric_of(self, form: str) -> str:
        return self.metric if form == "cf" else "raw"


PARQUET = "refs/convert/parquet"  # the hub's copy of a data set whose main branch is a script, which is no longer run

TASKS = {
    "arc_challenge": Task("allenai/ai2_arc", "ARC-Challenge", "test", "uncond", Template(templates.arc)),
    "arc_easy": Task("allenai/ai2_arc", "ARC-Easy", "test", "per_char", Template(templates.arc)),
    "boolq": Task("aps/super_glue", "boolq", "validation", "raw", Template(templates.boolq)),
    "csqa": Task("tau/commonsense_qa", None, "validation", "uncond", Template(templates.arc)),
    "hellaswag": Task(
        "Rowan/hellaswag",
        None,
        "validation",
        "per_char",
        Template(templates.hellaswag, mcf=templates.clean_choice),
    ),
    "mmlu": Task("cais/mmlu", "all", "test", "per_char", Template(templates.mmlu), "subject", "dev"),
    "openbookqa": Task("allenai/openbookqa", "main", "test", "uncond", Template(templates.openbookqa)),
    "piqa": Task("ybisk/piqa", None, "validation", "per_char", Template(templates.piqa), revision=PARQUET),
    "race": Task("ehovy/race", "high", "test", "per_char", Template(templates.race)),
    "socialiqa": Task(
        "allenai/social_i_qa", None, "validation", "per_char", Template(templates.socialiqa), revision=PARQUET
    ),
    "winogrande": Task(
        "allenai/winogrande",
        "winogrande_xl",
        "validation",
        "raw",
        Template(templates.winogrande, templates.fill_the_blank),
    ),
}


def subset(rows: Sequence[Any], task: Task) -> list[Any]:
    """Return the rows that OLMES scores, in its order: 1,000 drawn with seed 1234 if there are more than 1,500.

    A task with subjects keeps all rows.
    """
    if task.subjects or len(rows) <= SUBSET_ABOVE:
        return list(rows)
    return random.Random(SUBSET_SEED).sample(list(rows), SUBSET_SIZE)
