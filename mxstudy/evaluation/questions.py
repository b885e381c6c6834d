"""The questions of a task: its rows in OLMES' order, with description and shots, in one form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxstudy.data.evaluation_sets import Rows, load_rows
from mxstudy.evaluation.olmes import TASKS, subset
from mxstudy.evaluation.tasks import OlmesTask
from mxstudy.evaluation.templates import Question, describe_mmlu, with_shots
from mxstudy.reader import ConfigError, require, suggest

FORMS = ("cf", "mcf")
MMLU = "mmlu"


@dataclass(frozen=True)
class Asked:
    """What of a task is asked. `limit`: the first so many of OLMES' order, of MMLU spread over its subjects; None: all.

    `data_dir`: where the rows are, None for the hub. `shots_dir`: has TASK.shots.jsonl with solved rows; MMLU takes its
    own dev split.
    """

    shots: int = 0
    limit: int | None = None
    data_dir: Path | None = None
    shots_dir: Path | None = None


def build_tasks(name: str, form: str, asked: Asked) -> list[OlmesTask]:
    """One, or one a subject of MMLU. Raises ConfigError for a task that there is not, and for data that is missing."""
    if name not in TASKS:
        raise ConfigError(f"evaluation.tasks: {name!r} is not a task; {suggest(name, TASKS)}")
    task = TASKS[name]
    rows = subset(load_rows(name, task.path, task.name, task.split, asked.data_dir), name)
    groups = by_subject(rows, asked.limit) if name == MMLU else {name: rows[: asked.limit]}
    shots = shots_of(name, asked)
    return [
        OlmesTask(
            group,
            task.metric_of(form),
            [ask(name, form, row, shots.get(group, [])) for row in own],
        )
        for group, own in groups.items()
        if own
    ]


def ask(name: str, form: str, row: Mapping[str, object], shots: Sequence[Mapping[str, object]]) -> Question:
    template = TASKS[name].template
    description = describe_mmlu(str(row["subject"])) if name == MMLU else None
    solved = [template.question(shot, form) for shot in shots]
    return with_shots(template.question(row, form), solved, description)


def by_subject(rows: Rows, limit: int | None) -> dict[str, Rows]:
    """mmlu_SUBJECT to its rows; of `limit` rows in all every subject has its share, the first ones one more."""
    groups: dict[str, Rows] = defaultdict(list)
    for row in rows:
        groups[f"{MMLU}_{row['subject']}"].append(row)
    if limit is None:
        return dict(groups)
    share, more = divmod(limit, len(groups))
    return {name: own[: share + (number < more)] for number, (name, own) in enumerate(groups.items())}


def shots_of(name: str, asked: Asked) -> dict[str, Rows]:
    """By the name of the task, or of the subject's: the first rows of MMLU's dev split, or of the user's file."""
    if asked.shots == 0:
        return {}
    if name == MMLU:
        dev = by_subject(load_rows(name, TASKS[name].path, TASKS[name].name, "dev", asked.data_dir), None)
        return {group: own[: asked.shots] for group, own in dev.items()}
    require(
        asked.shots_dir is not None,
        f"evaluation.shots: {name} has none of its own; evaluation.shots_dir= names a folder with {name}.shots.jsonl",
    )
    rows = load_rows(name, TASKS[name].path, TASKS[name].name, "shots", asked.shots_dir)
    require(len(rows) >= asked.shots, f"evaluation.shots: {asked.shots} were asked for, {name}.shots has {len(rows)}")
    return {name: rows[: asked.shots]}
