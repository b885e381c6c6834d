from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from quiz import ROWS

from mxstudy.config import Evaluation
from mxstudy.data import evaluation_sets
from mxstudy.evaluation.olmes import TASKS
from mxstudy.evaluation.questions import build_questions, check
from mxstudy.evaluation.templates import Question
from mxstudy.reader import ConfigError


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def piqa(number: int) -> dict[str, Any]:
    return {"goal": f"goal {number}", "sol1": "one", "sol2": "two", "label": number % 2}


def mmlu(subject: str, number: int) -> dict[str, Any]:
    return {"subject": subject, "question": f"{subject} {number}", "choices": ["a", "b", "c", "d"], "answer": 0}


def contexts(asked: dict[str, list[Question]]) -> dict[str, list[str]]:
    return {group: [question.contexts[0] for question in own] for group, own in asked.items()}


def test_the_first_of_a_task(tmp_path: Path) -> None:
    write(tmp_path, "piqa.validation.jsonl", [piqa(number) for number in range(5)])
    found = contexts(build_questions("piqa", "cf", Evaluation(limit=2, data_dir=str(tmp_path))))
    assert found == {"piqa": ["Goal: goal 0\nAnswer:", "Goal: goal 1\nAnswer:"]}


def test_a_limit_of_mmlu_is_spread_over_its_subjects(tmp_path: Path) -> None:
    rows = [mmlu(subject, number) for subject in ("law", "art", "logic") for number in range(3)]
    pd.DataFrame(rows).to_parquet(tmp_path / "mmlu.test.parquet")
    found = build_questions("mmlu", "cf", Evaluation(limit=5, data_dir=str(tmp_path)))
    assert {name: len(asked) for name, asked in contexts(found).items()} == {
        "mmlu_law": 2,
        "mmlu_art": 2,
        "mmlu_logic": 1,
    }
    first = contexts(found)["mmlu_law"][0]
    assert first == (
        "The following are multiple choice questions (with answers) about law.\n\nQuestion: law 0\nAnswer:"
    )
    assert set(contexts(build_questions("mmlu", "cf", Evaluation(limit=1, data_dir=str(tmp_path))))) == {"mmlu_law"}


def test_shots_of_a_file_and_of_mmlu(tmp_path: Path) -> None:
    write(tmp_path, "mmlu.test.jsonl", [mmlu("law", 7)])
    write(tmp_path, "mmlu.dev.jsonl", [mmlu("law", number) for number in range(3)])
    (asked,) = contexts(build_questions("mmlu", "mcf", Evaluation(shots=2, data_dir=str(tmp_path))))["mmlu_law"]
    assert asked.count(" A. a\n B. b\n C. c\n D. d\nAnswer: A\n\n") == 2
    assert asked.endswith("Question: law 7\n A. a\n B. b\n C. c\n D. d\nAnswer:")
    write(tmp_path, "piqa.validation.jsonl", [piqa(3)])
    for place, says in (("nowhere", "nowhere is not a folder"), ("", r"has no piqa\.shots\*\.jsonl, .* or \.parquet$")):
        settings = Evaluation(shots=1, data_dir=str(tmp_path), shots_dir=str(tmp_path / place))
        with pytest.raises(ConfigError, match=rf"^evaluation\.shots_dir: .*{says}"):
            build_questions("piqa", "cf", settings)
    write(tmp_path, "piqa.shots.jsonl", [piqa(0)])
    with pytest.raises(ConfigError, match=r"2 shots were asked for, but piqa.shots has 1"):
        build_questions("piqa", "cf", Evaluation(shots=2, data_dir=str(tmp_path), shots_dir=str(tmp_path)))
    (asked,) = contexts(
        build_questions("piqa", "cf", Evaluation(shots=1, data_dir=str(tmp_path), shots_dir=str(tmp_path)))
    )["piqa"]
    assert asked == "Goal: goal 0\nAnswer: one\n\nGoal: goal 3\nAnswer:"
    write(tmp_path, "piqa.shots.jsonl", [piqa(0), piqa(3)])
    with pytest.raises(
        ConfigError, match=r"^evaluation\.shots_dir: .*piqa\.shots\.jsonl, row 2: piqa asks this question"
    ):
        build_questions("piqa", "cf", Evaluation(shots=2, data_dir=str(tmp_path), shots_dir=str(tmp_path)))


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'piqua' is not a task; did you mean 'piqa'"):
        check(Evaluation(tasks=("piqua",)))
    with pytest.raises(ConfigError, match=r"^tasks: names no task"):
        Evaluation(tasks=())
    with pytest.raises(ConfigError, match=r"has no piqa.validation\*.jsonl"):
        build_questions("piqa", "cf", Evaluation(data_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="is not a folder"):
        build_questions("piqa", "cf", Evaluation(data_dir=str(tmp_path / "nowhere")))
    for name in ("piqa.validation.jsonl", "piqa.validation_new.jsonl"):
        write(tmp_path, name, [piqa(0)])
    with pytest.raises(ConfigError, match=r"more than one piqa.validation"):
        build_questions("piqa", "cf", Evaluation(data_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"^evaluation\.data_dir: .*csqa\.validation\.jsonl has no rows"),
        (b"\n \n", "has no rows"),
        (b'{"a": 1}\n\n{"b"\n', r"^evaluation\.data_dir: .*\.jsonl, line 3: not valid JSON"),
        (b"[]\n", "line 1: must be a JSON object, not list"),
        (b"\xff\n", "cannot be read: 'utf-8' codec"),
    ],
)
def test_a_file_that_is_broken_is_named_with_the_line(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "csqa.validation.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        check(Evaluation(tasks=("csqa",), data_dir=str(tmp_path)))


@pytest.mark.parametrize("name", ["csqa.validation.parquet", "csqa.validation.jsonl.gz"])
def test_a_file_that_is_of_no_such_kind_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"text")
    with pytest.raises(ConfigError, match=rf"^evaluation\.data_dir: .*{name} cannot be read"):
        check(Evaluation(tasks=("csqa",), data_dir=str(tmp_path)))


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "piqa.validation.jsonl").write_text(f"\n{json.dumps(piqa(0))}\n\n")
    found = contexts(build_questions("piqa", "cf", Evaluation(data_dir=str(tmp_path))))
    assert found == {"piqa": ["Goal: goal 0\nAnswer:"]}


@pytest.mark.parametrize(
    ("task", "changed", "says"),
    [
        ("csqa", {"answerKey": None}, "it has no field 'answerKey'"),
        ("csqa", {"answerKey": "Z"}, "ValueError: 'Z' is not in list"),
        ("csqa", {"choices": {"text": [*"abcdef"], "label": [*"ABCDEF"]}}, "it has 6 options; must be 2 to 5"),
        ("piqa", {"label": -1}, "its answer is none of the 2 options"),
        ("mmlu", {"subject": None}, "it has no field 'subject'"),
        ("csqa", {"question": 7}, "its 'question' is 7; must be text"),
        ("piqa", {"sol2": " "}, "one of its options is empty or no text"),
        ("mmlu", {"choices": ["a", 2.5, "c", "d"]}, "one of its options is empty or no text"),
    ],
)
def test_a_row_that_is_no_question_is_named(task: str, changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    row = {key: value for key, value in (ROWS[task] | changed).items() if value is not None}
    file = f"{task}.{TASKS[task].split}.jsonl"
    write(tmp_path, file, [ROWS[task], row])
    with pytest.raises(ConfigError, match=rf"^evaluation\.data_dir: .*{file}, row 2: not a question of {task}: {says}"):
        check(Evaluation(tasks=(task,), data_dir=str(tmp_path)))


def test_a_hub_that_cannot_be_reached_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def away(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", away)
    fetch = "hf download --repo-type dataset ybisk/piqa --revision refs/convert/parquet"
    with pytest.raises(ConfigError, match=f"the split validation of .* ybisk/piqa cannot .* fetch it with `{fetch}`"):
        build_questions("piqa", "cf", Evaluation())
    rows, calls = [piqa(0), piqa(1)], []
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, **which: calls.append((path, which)) or rows)
    for _ in range(2):
        assert [*build_questions("piqa", "cf", Evaluation())] == ["piqa"]
    evaluation_sets.from_hub.cache_clear()
    assert calls == [("ybisk/piqa", {"split": "validation", "revision": "refs/convert/parquet"})]


def test_a_split_that_the_hubs_data_set_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(path: str, name: str | None, split: str, revision: str | None) -> list[dict[str, Any]]:
        if split == "train":
            raise ValueError('Unknown split "train". Should be one of ["test"].')
        return [ROWS["race"]]

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ConfigError, match=r"^race: the split train of the data set ehovy/race cannot be loaded"):
        build_questions("race", "cf", Evaluation(shots=1))
    evaluation_sets.from_hub.cache_clear()
