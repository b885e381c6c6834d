"""Choose the solved questions that stand before a question.

MMLU's are the first of its split dev, those of a user's file its first. All others are rows of the training split:
OLMES' own, or drawn ones. Drawn ones differ by question, and depend on the seed, the task and the question's place in
OLMES' order alone. A question of the evaluation itself is never drawn, even if the training split repeats it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mxstudy.config import Evaluation
from mxstudy.data.evaluation_sets import SHOTS, DataSetRows
from mxstudy.evaluation.curated_shots import find_curated
from mxstudy.evaluation.olmes import TASKS, TRAIN
from mxstudy.evaluation.task_rows import (
    check_rows,
    file_identity,
    group_of,
    place_of,
    rows_of,
    unchecked_rows,
    what_is_wrong,
)
from mxstudy.evaluation.templates import DataSetRow
from mxstudy.reader import require


class Shot(NamedTuple):
    number: int  # of the row in its split or file, from 0
    row: DataSetRow


class Shots(NamedTuple):
    """The shots of a task. `pool`: the shots to choose from, by group: the task, or each of its subjects.

    `wanted`: how many stand before a question. `seed`: the seed that draws them; None: take the first of the pool.
    """

    pool: Mapping[str, Sequence[Shot]]
    wanted: int
    seed: int | None = None

    def before(self, group: str, place: int) -> Sequence[Shot]:
        """Return the shots before the question at this place of the group, in the order in which they stand there."""
        if not self.wanted:
            return []
        require(group in self.pool, f"evaluation.shots: {group} has none")
        if self.seed is None:
            return self.pool[group][: self.wanted]
        return random.Random(f"{self.seed} {group} {place}").sample(self.pool[group], self.wanted)


class ShotSource(NamedTuple):
    """Name where a task's shots come from: a split in a folder (None is the hub), and its rows, by number.

    `rows`: called with the task, the rows, the settings and, for errors, the place of the rows. `drawn`: whether each
    question draws its own of them.
    """

    split: str
    folder: str | None
    rows: Callable[[str, DataSetRows, Evaluation, str], Sequence[int]]
    drawn: bool = False


def source_of(name: str, settings: Evaluation) -> ShotSource:
    own_split = TASKS[name].shots_split
    if own_split != TRAIN:
        return ShotSource(own_split, settings.data_dir, all_rows)
    if settings.shots_dir is not None:
        return ShotSource(SHOTS, settings.shots_dir, rows_of_file)
    if settings.curated_shots:
        return ShotSource(TRAIN, settings.data_dir, curated_rows)
    return ShotSource(TRAIN, settings.data_dir, training_rows, drawn=True)


def shots_of(name: str, settings: Evaluation) -> Shots:
    """Return a task's shots. Raises ConfigError, naming the split, if it is not there or has too few."""
    wanted = settings.shots_of(name)
    if not wanted:
        return Shots({}, 0)
    source = source_of(name, settings)
    rows, place = unchecked_rows(name, source.split, source.folder), place_of(name, source.split, source.folder)
    pool: dict[str, list[Shot]] = defaultdict(list)
    for number in source.rows(name, rows, settings, place):
        pool[group_of(name, rows[number])].append(Shot(number, rows[number]))
    least = min(map(len, pool.values()), default=0)
    require(least >= wanted, f"{place}: {wanted} shots were asked for, but {name}.{source.split} has {least}")
    return Shots(pool, wanted, settings.shots_seed if source.drawn else None)


def all_rows(name: str, rows: DataSetRows, settings: Evaluation, place: str) -> Sequence[int]:
    check_rows(name, rows, place)
    return range(len(rows))


def rows_of_file(name: str, rows: DataSetRows, settings: Evaluation, place: str) -> Sequence[int]:
    """Return all numbers. Raises ConfigError if a shot is also one of the questions."""
    check_rows(name, rows, place)
    asked = texts_asked(name, settings)
    for number, row in enumerate(rows[: settings.shots_of(name)], start=1):
        require(text_of(name, row) not in asked, f"{place}, row {number}: {name} asks this question; show another one")
    return range(len(rows))


def curated_rows(name: str, rows: DataSetRows, settings: Evaluation, place: str) -> Sequence[int]:
    return find_curated(name, rows, settings.shots_of(name), place)


def training_rows(name: str, rows: DataSetRows, settings: Evaluation, place: str) -> Sequence[int]:
    """Return the numbers of the rows that are questions, without those of the evaluation itself.

    Raises ConfigError if no row is a question.
    """
    wrong = [what_is_wrong(row, TASKS[name]) for row in rows]
    require(None in wrong, f"{place}: no row is a question of {name}; row 1: {wrong[0]}")
    asked = texts_asked(name, settings)
    return [number for number, row in enumerate(rows) if wrong[number] is None and text_of(name, row) not in asked]


def texts_asked(name: str, settings: Evaluation) -> set[tuple[str, ...]]:
    """Return text and options of all questions of the split that is scored."""
    return {text_of(name, row) for row in rows_of(name, TASKS[name].split, settings.data_dir)}


def text_of(name: str, row: DataSetRow) -> tuple[str, ...]:
    parsed = TASKS[name].template.parse(row)
    return parsed.cloze, *parsed.options


def identity(name: str, settings: Evaluation) -> dict[str, Any]:
    """Return what identifies a task's shots in a fingerprint, beside the settings: their file or data set."""
    source = source_of(name, settings)
    found = file_identity(name, source.split, source.folder)
    return found | {"split": TRAIN} if source.split == TRAIN else found  # the same file may be a user's own shots
