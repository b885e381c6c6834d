"""Build the questions of a task in one form: its rows in OLMES' order, with description and shots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mxstudy.config import Evaluation
from mxstudy.data import evaluation_sets
from mxstudy.data.evaluation_sets import SHOTS, DataMissing, DataSetRows, load_rows
from mxstudy.evaluation.olmes import TASKS, Task, subset
from mxstudy.evaluation.templates import LETTERS, Question, describe_mmlu, with_shots
from mxstudy.reader import ConfigError, require, suggest

ANSWERS = ("label", "answer", "answerKey")  # which may be numbers


def check(settings: Evaluation) -> None:
    """Raise ConfigError for an unknown task, and for questions or shots that cannot be loaded."""
    for name in settings.tasks:
        require(name in TASKS, f"evaluation.tasks: {name!r} is not a task; {suggest(name, TASKS)}")
    require(bool(at_hand(settings)), "evaluation.tasks: the data of none of them can be loaded")


def at_hand(settings: Evaluation, say: Callable[[str], object] | None = None) -> list[str]:
    """Return the tasks whose data can be loaded.

    With `skip_missing`, report the others to `say` and leave them out; otherwise raise DataMissing.
    """
    tasks = []
    for name in settings.tasks:
        try:
            rows_of(name, TASKS[name].split, settings.data_dir)
            shots_of(name, settings)
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
            found[f"{name}.shots"] = file_identity(name, *shots_place(name, settings))
    return found


def build_questions(name: str, form: str, settings: Evaluation) -> dict[str, list[Question]]:
    """Return the questions of a task under its name, or of each of its subjects under the subject's name.

    Raises ConfigError for missing data.
    """
    task = TASKS[name]
    groups = by_subject(name, subset(rows_of(name, task.split, settings.data_dir), task), settings.limit)
    shots = shots_of(name, settings)
    return {group: [ask(name, form, row, shots.get(group, [])) for row in own] for group, own in groups.items() if own}


def rows_of(name: str, split: str, folder: str | None) -> DataSetRows:
    """Return the rows of a split. Raises ConfigError, naming file and row, if one is not a question of the task."""
    task, where = TASKS[name], Path(folder) if folder else None
    rows = load_rows(name, task.path, task.name, split, where)
    for number, row in enumerate(rows, start=1):
        if wrong := what_is_wrong(row, task):
            place = evaluation_sets.place_of(name, task.path, split, where)
            raise ConfigError(f"{place}, row {number}: not a question of {name}: {wrong}")
    return rows


class Fields(dict[str, object]):
    """A row that notes the first field, other than the answer and lists of options, that is read and is no text."""

    no_text: str | None = None

    def __getitem__(self, name: str) -> object:
        value = super().__getitem__(name)
        if name not in ANSWERS and self.no_text is None and not isinstance(value, str | list | tuple | dict):
            self.no_text = name
        return value


def what_is_wrong(row: Mapping[str, object], task: Task) -> str | None:
    read = Fields(row)
    try:
        parsed = task.template.parse(read)
    except KeyError as error:
        return f"it has no field {error}"
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    options = len(parsed.options)
    if task.subjects and task.subjects not in row:
        return f"it has no field {task.subjects!r}"
    if not 2 <= options <= len(LETTERS):
        return f"it has {options} options; must be 2 to {len(LETTERS)}"
    if read.no_text is not None:
        return f"its {read.no_text!r} is {row[read.no_text]!r}; must be text"
    if any(not isinstance(option, str) or not option.strip() for option in parsed.options):
        return f"one of its options is empty or no text: {list(parsed.options)!r}"
    return None if 0 <= parsed.gold < options else f"its answer is none of the {options} options"


def file_identity(name: str, split: str, folder: str | None) -> dict[str, Any]:
    return evaluation_sets.identity(name, TASKS[name].path, TASKS[name].name, split, Path(folder) if folder else None)


def ask(name: str, form: str, row: Mapping[str, object], shots: Sequence[Mapping[str, object]]) -> Question:
    task = TASKS[name]
    description = describe_mmlu(str(row[task.subjects])) if task.subjects else None
    solved = [task.template.question(shot, form) for shot in shots]
    return with_shots(task.template.question(row, form), solved, description)


def by_subject(name: str, rows: DataSetRows, limit: int | None) -> dict[str, DataSetRows]:
    """Return the rows by NAME_SUBJECT; a `limit` is divided over the subjects, the first ones getting one row more."""
    column = TASKS[name].subjects
    if column is None:
        return {name: rows[:limit]}
    groups: dict[str, DataSetRows] = defaultdict(list)
    for row in rows:
        groups[f"{name}_{row[column]}"].append(row)
    if limit is None:
        return dict(groups)
    share, more = divmod(limit, len(groups))
    return {group: own[: share + (number < more)] for number, (group, own) in enumerate(groups.items())}


def shots_of(name: str, settings: Evaluation) -> dict[str, DataSetRows]:
    """Return the shots by name of the task or subject: the first rows of the task's shots split or the user's file."""
    wanted = settings.shots_of(name)
    if wanted == 0:
        return {}
    split, folder = shots_place(name, settings)
    groups = by_subject(name, rows_of(name, split, folder), None)
    least = min(map(len, groups.values()))
    require(least >= wanted, f"evaluation.shots: {wanted} were asked for, but {name}.{split} has {least}")
    return {group: own[:wanted] for group, own in groups.items()}


def shots_place(name: str, settings: Evaluation) -> tuple[str, str | None]:
    """Return the split of the shots, and their folder, None for the hub. Raises DataMissing if there is neither."""
    own_split = TASKS[name].shots_split
    if own_split:
        return own_split, settings.data_dir
    if settings.shots_dir is None:
        raise DataMissing(
            f"evaluation.shots: {name} has none of its own; set evaluation.shots_dir= to a folder with "
            f"{name}.shots.jsonl"
        )
    return SHOTS, settings.shots_dir
