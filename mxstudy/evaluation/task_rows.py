"""The rows of a task's data set: every one a question, or refused with its file and number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxstudy.data import evaluation_sets
from mxstudy.data.evaluation_sets import DataSetRows, load_rows
from mxstudy.evaluation.olmes import TASKS, Task
from mxstudy.evaluation.templates import LETTERS
from mxstudy.reader import ConfigError

ANSWERS = ("label", "answer", "answerKey")  # which may be numbers


def rows_of(name: str, split: str, folder: str | None) -> DataSetRows:
    """Return the rows of a split. Raises ConfigError, naming file and row, if one is not a question of the task."""
    rows = unchecked_rows(name, split, folder)
    check_rows(name, rows, place_of(name, split, folder))
    return rows


def check_rows(name: str, rows: DataSetRows, place: str) -> None:
    """Raise ConfigError, naming place and row, for a row that is not a question of the task."""
    for number, row in enumerate(rows, start=1):
        if wrong := what_is_wrong(row, TASKS[name]):
            raise ConfigError(f"{place}, row {number}: not a question of {name}: {wrong}")


def unchecked_rows(name: str, split: str, folder: str | None) -> DataSetRows:
    task = TASKS[name]
    return load_rows(name, task.path, task.name, split, Path(folder) if folder else None, task.revision)


def place_of(name: str, split: str, folder: str | None) -> str:
    """Return where the rows of a split are, for an error message."""
    return evaluation_sets.place_of(name, TASKS[name].path, split, Path(folder) if folder else None)


def file_identity(name: str, split: str, folder: str | None) -> dict[str, Any]:
    return evaluation_sets.identity(name, TASKS[name].path, TASKS[name].name, split, Path(folder) if folder else None)


class Fields(dict[str, object]):
    """A row that remembers the first field read that is not text; answers, lists and mappings are exempt."""

    no_text: str | None = None

    def __getitem__(self, name: str) -> object:
        value = super().__getitem__(name)
        if name not in ANSWERS and self.no_text is None and not isinstance(value, str | list | tuple | dict):
            self.no_text = name
        return value


def what_is_wrong(row: Mapping[str, object], task: Task) -> str | None:
    """Return why a row is no question of the task, or None if it is one."""
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


def group_of(name: str, row: Mapping[str, object]) -> str:
    """Return the task's name, or NAME_SUBJECT of a row if the task has subjects."""
    column = TASKS[name].subjects
    return name if column is None else f"{name}_{row[column]}"


def by_subject(name: str, rows: DataSetRows, limit: int | None) -> dict[str, DataSetRows]:
    """Return the rows by NAME_SUBJECT; a `limit` is divided over the subjects, the first ones getting one row more."""
    groups: dict[str, DataSetRows] = defaultdict(list)
    for row in rows:
        groups[group_of(name, row)].append(row)
    if limit is None:
        return dict(groups)
    share, more = divmod(limit, len(groups))
    return {group: own[: share + (number < more)] for number, (group, own) in enumerate(groups.items())}
