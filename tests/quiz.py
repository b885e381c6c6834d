"""Hold one hand-written row of every task's data set, and write folders of them in place of the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mxstudy.evaluation.olmes import TASKS

DATA = Path(__file__).parents[2] / "shared" / "data" / "olmes"  # the real ones, which are not part of the project
ARC = {
    "question": "What melts?",
    "choices": {"text": ["ice", "rock", "air"], "label": ["1", "2", "3"]},
    "answerKey": "1",
}
ROWS: dict[str, dict[str, Any]] = {
    "arc_challenge": ARC,
    "arc_easy": ARC,
    "csqa": {
        "question": "Where is it?",
        "choices": {"label": list("ABCDE"), "text": ["a", "b", "c", "d", "e"]},
        "answerKey": "E",
    },
    "openbookqa": {
        "question_stem": "The sun is",
        "choices": {"text": ["hot", "cold"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "boolq": {"passage": "Ice -- Frozen water.", "question": "is ice wet", "label": 0},
    "hellaswag": {
        "activity_label": "Finance",
        "ctx_a": "[header] How to save [title] Look. [step] Find a bank.",
        "ctx_b": "the teller",
        "endings": ["smiles. [substeps] Twice.", " waits."],
        "label": "1",
    },
    "mmlu": {"question": "2 + 2 = ", "choices": ["3", "4", "5", "6"], "answer": 1, "subject": "abstract_algebra"},
    "piqa": {"goal": "Open a jar", "sol1": "twist it", "sol2": "eat it", "label": 0},
    "race": {"article": "Ann ran.", "question": "Who ran?", "options": ["Bob", "Ann"], "answer": "B"},
    "socialiqa": {
        "context": "Kim left.",
        "question": "Why?",
        "answerA": "tired",
        "answerB": "late",
        "answerC": "ill",
        "label": "3",
    },
    "winogrande": {"sentence": "Sam beat Max because _ was fast. ", "option1": "Sam", "option2": "Max", "answer": "1"},
}


TEXTS = ("question", "question_stem", "goal", "activity_label", "sentence")  # the fields that hold a question's text


def another(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a row with another question, the same for the same number."""
    text = next(field for field in TEXTS if field in row)
    return row | {text: f"{number} {row[text]}"}


def write_sets(folder: Path, rows: int = 5) -> Path:
    """Write every task's split with so many copies of its row, and other rows to show.

    MMLU has two subjects, with a split dev.
    """
    for name, task in TASKS.items():
        write_rows(folder / f"{name}.{task.split}.jsonl", [ROWS[name]] * rows)
        for split in ("train", "shots"):
            write_rows(folder / f"{name}.{split}.jsonl", [another(ROWS[name], number) for number in range(rows)])
    subjects = [ROWS["mmlu"], ROWS["mmlu"] | {"subject": "law", "answer": 2}]
    for split in ("test", "dev"):
        write_rows(folder / f"mmlu.{split}.jsonl", subjects * rows)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
