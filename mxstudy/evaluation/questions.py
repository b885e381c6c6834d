"""Build the questions of a task in one form: its rows in OLMES' order, with description and shots."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mxstudy.config import Evaluation
from mxstudy.data.evaluation_sets import DataMissing
from mxstudy.evaluation import shots
from mxstudy.evaluation.olmes import TASKS, TRAIN, subset
from mxstudy.evaluation.shots import Shot
from mxstudy.evaluation.task_rows import by_subject, file_identity, rows_of
from mxstudy.evaluation.templates import Question, describe_mmlu, with_shots
from mxstudy.reader import require, suggest


def check(settings: Evaluation) -> None:
    """Raise ConfigError for an unknown task, and for questions or shots that cannot be loaded.

    With `skip_missing`, print which are left out, and raise it only if none is left.
    """
    for name in settings.tasks:
        require(name in TASKS, f"evaluation.tasks: {name!r} is not a task; {suggest(name, TASKS)}")
    asked = [name for name in settings.tasks if settings.shots_of(name)]
    chosen = [name for name in asked if TASKS[name].shots_split == TRAIN]
    for key in settings.about_shots:
        require(bool(chosen), f"evaluation.{key}: has no effect on the fixed shots of {', '.join(asked)}; leave it out")
    require(bool(at_hand(settings, say_once)), "evaluation.tasks: the data of none of them can be loaded")


@functools.cache
def say_once(line: str) -> None:
    """Print a line that the checks of several jobs have in common."""
    print(line)


def at_hand(settings: Evaluation, say: Callable[[str], object] | None = None) -> list[str]:
    """Return the tasks whose data can be loaded.

    With `skip_missing`, report the others to `say` and leave them out; otherwise raise DataMissing.
    """
    tasks = []
    for name in settings.tasks:
        try:
            rows_of(name, TASKS[name].split, settings.data_dir)
            shots.shots_of(name, settings)
            tasks.append(name)
        except DataMissing as error:
            if not settings.skip_missing:
                raise
            if say:
                say(f"left out: {name}: {error}")
    return tasks


def identity(settings: Evaluation) -> dict[str, Any]:
    """Return the identity, for a fingerprint, of the files or data sets of all questions and shots, by task."""
    found = {}
    for name in at_hand(settings):
        found[name] = file_identity(name, TASKS[name].split, settings.data_dir)
        if settings.shots_of(name):
            found[f"{name}.shots"] = shots.identity(name, settings)
    return found


def build_questions(name: str, form: str, settings: Evaluation) -> dict[str, list[Question]]:
    """Return the questions of a task under its name, or of each of its subjects under the subject's name.

    Raises ConfigError for missing data.
    """
    task = TASKS[name]
    groups = by_subject(name, subset(rows_of(name, task.split, settings.data_dir), task), settings.limit)
    own_shots = shots.shots_of(name, settings)
    return {
        group: [ask(name, form, row, own_shots.before(group, place)) for place, row in enumerate(own)]
        for group, own in groups.items()
        if own
    }


def ask(name: str, form: str, row: Mapping[str, object], before: Sequence[Shot]) -> Question:
    task = TASKS[name]
    description = describe_mmlu(str(row[task.subjects])) if task.subjects else None
    solved = [task.template.question(shot.row, form) for shot in before]
    question = with_shots(task.template.question(row, form), solved, description)
    return replace(question, shots=tuple(shot.number for shot in before))
