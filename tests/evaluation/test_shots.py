"""The shots before a question come from the training split, by a seed, or are OLMES' own rows of it."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from quiz import DATA, ROWS, another, write_rows

from mxstudy.config import Evaluation
from mxstudy.evaluation import curated_shots, questions
from mxstudy.evaluation.curated_shots import CURATED, Curated
from mxstudy.evaluation.olmes import TASKS
from mxstudy.evaluation.questions import build_questions, check
from mxstudy.evaluation.templates import Question, describe_mmlu
from mxstudy.reader import ConfigError

ASKED = 8
DRAWN = [name for name, task in TASKS.items() if not task.subjects]


def rows_of(name: str, count: int, first: int = 0) -> list[dict[str, Any]]:
    return [another(ROWS[name], number) for number in range(first, first + count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write questions 0 to 7 of every task, and as its training split two of those and then 8 to 27."""
    for name in DRAWN:
        write_rows(tmp_path / f"{name}.{TASKS[name].split}.jsonl", rows_of(name, ASKED))
        write_rows(tmp_path / f"{name}.train.jsonl", [*rows_of(name, 2), *rows_of(name, 20, ASKED)])
    return tmp_path


def asked(name: str, form: str = "cf", **settings: Any) -> list[Question]:
    (found,) = build_questions(name, form, Evaluation(tasks=(name,), **settings)).values()
    return found


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("form", ["cf", "mcf"])
def test_each_question_has_shots_of_its_own_from_the_training_split(name: str, form: str, folder: Path) -> None:
    train = [*rows_of(name, 2), *rows_of(name, 20, ASKED)]
    found = asked(name, form, shots=2, data_dir=str(folder))
    plain = asked(name, form, data_dir=str(folder))
    for question, alone in zip(found, plain, strict=True):
        solved = [TASKS[name].template.question(train[number], form).solved for number in question.shots]
        assert question.contexts == tuple("\n\n".join([*solved, context]) for context in alone.contexts)
        assert len(set(question.shots)) == 2
        assert not {0, 1} & set(question.shots)  # the rows that are also questions
    assert len({question.shots for question in found}) > 1


def test_shots_are_drawn_by_the_seed_and_the_question_alone(folder: Path) -> None:
    numbers = [question.shots for question in asked("piqa", shots=1, data_dir=str(folder))]
    assert [q.shots for q in asked("piqa", "mcf", shots=1, data_dir=str(folder))] == numbers
    assert [q.shots for q in asked("piqa", shots=1, limit=3, data_dir=str(folder))] == numbers[:3]
    assert [q.shots for q in asked("piqa", shots=1, shots_seed=1, data_dir=str(folder))] != numbers
    assert [q.shots for q in asked("race", shots=1, data_dir=str(folder))] != numbers
    assert numbers[:4] == [(2,), (11,), (15,), (12,)]  # as before


def test_rows_that_are_no_questions_are_not_drawn(folder: Path) -> None:
    broken = ROWS["race"] | {"options": ["one"]}
    write_rows(folder / "race.train.jsonl", [broken, *rows_of("race", 1, 50), broken])
    assert {question.shots for question in asked("race", shots=1, data_dir=str(folder))} == {(1,)}
    with pytest.raises(ConfigError, match=r"2 shots were asked for, but race\.train has 1$"):
        asked("race", shots=2, data_dir=str(folder))
    write_rows(folder / "race.train.jsonl", [broken])
    says = r"^evaluation\.data_dir: .*race\.train\.jsonl: no row is a question of race; row 1: it has 1 options"
    with pytest.raises(ConfigError, match=says):
        asked("race", shots=1, data_dir=str(folder))


def test_a_training_split_that_is_missing_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "race.train.jsonl").unlink()
    settings = {"tasks": ("piqa", "race"), "shots": 1, "data_dir": str(folder)}
    with pytest.raises(ConfigError, match=r"^evaluation\.data_dir: .* has no race\.train\*\.jsonl"):
        check(Evaluation(**settings))
    said: list[str] = []
    assert questions.at_hand(Evaluation(**settings, skip_missing=True), said.append) == ["piqa"]
    for _ in range(2):
        questions.check(Evaluation(**settings, skip_missing=True))
    assert capsys.readouterr().out.count("left out: ") == 1
    assert said[0].startswith("left out: race: ")
    assert questions.at_hand(Evaluation(tasks=("race",), data_dir=str(folder))) == ["race"]


def test_no_task_shows_what_it_scores() -> None:
    assert all(task.shots_split != task.split for task in TASKS.values())
    assert {name: task.shots_split for name, task in TASKS.items() if task.shots_split != "train"} == {"mmlu": "dev"}


def test_a_subject_without_shots_is_named(tmp_path: Path) -> None:
    law = ROWS["mmlu"] | {"subject": "law"}
    write_rows(tmp_path / "mmlu.test.jsonl", [law, ROWS["mmlu"]])
    write_rows(tmp_path / "mmlu.dev.jsonl", [law])
    with pytest.raises(ConfigError, match=r"^evaluation\.shots: mmlu_abstract_algebra has none$"):
        build_questions("mmlu", "mcf", Evaluation(shots=1, data_dir=str(tmp_path)))


def test_a_fingerprint_knows_the_shots(folder: Path) -> None:
    """The fingerprint also knows a user's own file that is the training split under another name."""
    settings = {"tasks": ("piqa",), "shots": 1, "data_dir": str(folder)}
    drawn = questions.identity(Evaluation(**settings))
    (folder / "piqa.shots.jsonl").write_text("".join((folder / "piqa.train.jsonl").read_text().splitlines(True)[2:]))
    own = questions.identity(Evaluation(**settings, shots_dir=str(folder)))
    assert own.keys() == drawn.keys() == {"piqa", "piqa.shots"}
    (folder / "piqa.train.jsonl").write_bytes((folder / "piqa.shots.jsonl").read_bytes())
    assert questions.identity(Evaluation(**settings)) != own != drawn


# --------------------------------------------------------------------------------------------------- OLMES' own


def test_olmes_shots_are_found_in_the_training_split_in_its_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = rows_of("piqa", 20, ASKED)
    texts = [f"{train[number]['goal']}|{train[number]['sol1']}" for number in (7, 3, 11)]
    keys = tuple(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)
    monkeypatch.setitem(curated_shots.CURATED, "piqa", Curated(("goal", "sol1"), keys, digests=True))
    found = asked("piqa", shots=2, curated_shots=True, data_dir=str(folder))
    assert {question.shots for question in found} == {(9, 5)}  # two rows of the file come before these
    with pytest.raises(ConfigError, match=r"^evaluation\.curated_shots: piqa has 3, not 4$"):
        asked("piqa", shots=4, curated_shots=True, data_dir=str(folder))
    monkeypatch.setitem(curated_shots.CURATED, "piqa", Curated(("goal",), (train[2]["goal"], "nowhere")))
    with pytest.raises(ConfigError, match=r"piqa\.train\.jsonl: has no row with the goal nowhere, a shot of OLMES for"):
        asked("piqa", shots=2, curated_shots=True, data_dir=str(folder))


def test_what_has_no_shots_of_olmes_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^evaluation\.curated_shots: OLMES has none for race"):
        asked("race", shots=5, curated_shots=True, data_dir=str(folder))
    with pytest.raises(ConfigError, match=r"arc_easy\.train\.jsonl: its rows have no 'id', by which OLMES'"):
        asked("arc_easy", shots=5, curated_shots=True, data_dir=str(folder))


def test_olmes_has_five_of_each_of_its_tasks() -> None:
    assert CURATED.keys() == {name for name in TASKS if name not in ("mmlu", "race")}
    assert all(len(set(curated.keys)) == 5 for curated in CURATED.values())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"curated_shots": True, "shots_dir": "x"}, "curated_shots: shots_dir has shots of its own"),
        ({"curated_shots": True}, "curated_shots: no shots are asked for"),
        ({"shots_seed": 1}, "shots_seed: no shots are asked for"),
        ({"shots_dir": "x"}, "shots_dir: no shots are asked for"),
        ({"curated_shots": True, "shots_seed": 1}, "shots_seed: with curated_shots no shot is drawn"),
        ({"shots_dir": "x", "shots_seed": 1}, "shots_seed: with shots_dir no shot is drawn"),
        ({"task_forms": {"piqua": "cf"}}, "task_forms: piqua is not one of the tasks"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{says}"):
        Evaluation(**settings)


@pytest.mark.parametrize("settings", [{"shots_dir": "x"}, {"curated_shots": True}, {"shots_seed": 1}])
def test_what_chooses_shots_is_refused_for_a_task_that_has_its_own(settings: dict[str, Any]) -> None:
    key = next(iter(settings))
    with pytest.raises(ConfigError, match=rf"^evaluation\.{key}: has no effect on the fixed shots of mmlu"):
        questions.check(Evaluation(tasks=("piqa", "mmlu"), task_shots={"mmlu": 5}, **settings))


# ------------------------------------------------------------------------------------------------ the real data

at_hand = pytest.mark.skipif(not DATA.exists(), reason="the evaluation sets are not here")


@at_hand
def test_each_subject_of_mmlu_has_its_five_of_dev_in_order() -> None:
    with gzip.open(DATA / "mmlu.dev.jsonl.gz", "rt") as lines:
        dev = [json.loads(line) for line in lines]
    found = build_questions("mmlu", "mcf", Evaluation(shots=5, limit=114, data_dir=str(DATA)))
    assert len(found) == 57
    for group, own in found.items():
        numbers = [number for number, row in enumerate(dev) if f"mmlu_{row['subject']}" == group]
        assert {question.shots for question in own} == {tuple(numbers[:5])}
        solved = [TASKS["mmlu"].template.question(dev[number], "mcf").solved for number in numbers[:5]]
        shown = "\n\n".join([describe_mmlu(group.removeprefix("mmlu_")), *solved, "Question: "])
        assert all(question.contexts[0].startswith(shown) for question in own)


@pytest.mark.integration
@at_hand
def test_the_training_splits_that_are_not_there_are_named() -> None:
    for name in DRAWN:
        if name != "race":
            with pytest.raises(ConfigError, match=rf"has no {name}\.train\*\.jsonl"):
                asked(name, shots=1, data_dir=str(DATA))


def test_a_task_has_a_form_of_its_own() -> None:
    chosen = Evaluation(form="cf", task_forms={"mmlu": "mcf", "piqa": "best"})
    assert [chosen.forms_of(name) for name in ("mmlu", "piqa", "csqa")] == [("mcf",), ("mcf", "cf"), ("cf",)]
