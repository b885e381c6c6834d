"""Prompts of every task and form equal those written by hand, and the real data, if present, has the known counts."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from each import each
from quiz import DATA, ROWS

from mxstudy.evaluation.olmes import TASKS, subset
from mxstudy.evaluation.templates import clean, describe_mmlu, with_shots

CLOZE = {
    "arc_challenge": (["Question: What melts?\nAnswer:"] * 3, [" ice", " rock", " air"], 0),
    "arc_easy": (["Question: What melts?\nAnswer:"] * 3, [" ice", " rock", " air"], 0),
    "csqa": (["Question: Where is it?\nAnswer:"] * 5, [" a", " b", " c", " d", " e"], 4),
    "openbookqa": (["Question: The sun is\nAnswer:"] * 2, [" hot", " cold"], 0),
    "boolq": (["Ice -- Frozen water.\nQuestion: is ice wet?\nAnswer:"] * 2, [" yes", " no"], 1),
    "hellaswag": (["Finance: How to save. Look. Find a bank. The teller"] * 2, [" smiles. Twice.", " waits."], 1),
    "mmlu": (["Question: 2 + 2 = \nAnswer:"] * 4, [" 3", " 4", " 5", " 6"], 1),
    "piqa": (["Goal: Open a jar\nAnswer:"] * 2, [" twist it", " eat it"], 0),
    "race": (["Ann ran.\nQuestion: Who ran?\nAnswer:"] * 2, [" Bob", " Ann"], 1),
    "socialiqa": (["Question: Kim left. Why?\nAnswer:"] * 3, [" tired", " late", " ill"], 2),
    "winogrande": (["Sam beat Max because Sam", "Sam beat Max because Max"], [" was fast."] * 2, 0),
}
CHOICE = {
    "arc_challenge": "Question: What melts?\n A. ice\n B. rock\n C. air\nAnswer:",
    "arc_easy": "Question: What melts?\n A. ice\n B. rock\n C. air\nAnswer:",
    "csqa": "Question: Where is it?\n A. a\n B. b\n C. c\n D. d\n E. e\nAnswer:",
    "openbookqa": "Question: The sun is\n A. hot\n B. cold\nAnswer:",
    "boolq": "Ice -- Frozen water.\nQuestion: is ice wet?\n A. yes\n B. no\nAnswer:",
    "hellaswag": "Finance: How to save. Look. Find a bank. The teller\nChoose the best continuation:\n"
    " A. smiles. Twice.\n B. waits.\nAnswer:",
    "mmlu": "Question: 2 + 2 = \n A. 3\n B. 4\n C. 5\n D. 6\nAnswer:",
    "piqa": "Goal: Open a jar\n A. twist it\n B. eat it\nAnswer:",
    "race": "Ann ran.\nQuestion: Who ran?\n A. Bob\n B. Ann\nAnswer:",
    "socialiqa": "Question: Kim left. Why?\n A. tired\n B. late\n C. ill\nAnswer:",
    "winogrande": "Fill in the blank: Sam beat Max because ___ was fast. \n A. Sam\n B. Max\nAnswer:",
}


@each("name", TASKS)
def test_cloze(name: str) -> None:
    question = TASKS[name].template.question(ROWS[name], "cf")
    contexts, continuations, gold = CLOZE[name]
    assert (list(question.contexts), list(question.continuations), question.gold) == (contexts, continuations, gold)


@each("name", TASKS)
def test_multiple_choice(name: str) -> None:
    question = TASKS[name].template.question(ROWS[name], "mcf")
    options = len(CLOZE[name][1])
    assert question.contexts == (CHOICE[name],) * options
    assert list(question.continuations) == [f" {letter}" for letter in "ABCDE"[:options]]
    assert question.gold == CLOZE[name][2]


def test_shots_stand_before_the_question_solved() -> None:
    template = TASKS["winogrande"].template
    question = template.question(ROWS["winogrande"], "cf")
    shot = template.question({"sentence": "He saw _ .", "option1": "it", "option2": "her", "answer": "2"}, "cf")
    assert with_shots(question, [shot]).contexts[0] == "He saw her .\n\nSam beat Max because Sam"
    described = with_shots(question, [], describe_mmlu("abstract_algebra"))
    assert described.contexts[1] == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\nSam beat Max because Max"
    )
    assert described.continuations == question.continuations


def test_hellaswags_choice_is_clean_as_a_whole() -> None:
    """Raw rows and cleaned rows give the same text. A space at a line's end is OLMES' own."""
    template = TASKS["hellaswag"].template
    raw = ROWS["hellaswag"] | {"ctx_b": "", "endings": ["[step] Follow [title] it. ", "[title] Go. [substeps] On."]}
    ask = "Finance: How to save. Look. Find a bank."
    choice = f"{ask} \nChoose the best continuation:\n A. Follow. it. \n B. Go. On.\nAnswer:"
    assert template.question(raw, "mcf").contexts == (choice,) * 2
    before = {"query": ask, "endings": [" Follow. it.", " Go. On."], "label": 1}
    choice = f"{ask}\nChoose the best continuation:\n A. Follow. it.\n B. Go. On.\nAnswer:"
    assert template.question(before, "mcf").contexts == (choice,) * 2
    for row in (raw, before):
        found = template.question(row, "cf")
        assert (found.contexts[0], found.continuations) == (ask, ("  Follow. it.", "  Go. On."))


def test_titles_end_a_sentence_once() -> None:
    assert clean(" Save. [title] Fill [step] it.") == "Save. Fill it."


# ------------------------------------------------------------------------------------------------ the real data

at_hand = pytest.mark.skipif(not DATA.exists(), reason="the evaluation sets are not here")
COUNTS = {  # OLMES' numbers of documents, and of requests in cloze form without the unconditional ones
    "arc_challenge": (1172, 4687),
    "arc_easy": (1000, 4000),
    "boolq": (1000, 2000),
    "csqa": (1221, 6105),
    "hellaswag": (1000, 4000),
    "mmlu": (14042, 56168),
    "openbookqa": (500, 2000),
    "piqa": (1000, 2000),
    "socialiqa": (1000, 3000),
    "winogrande": (1267, 2534),
}


def rows_of(name: str) -> list[dict[str, Any]]:
    (path,) = DATA.glob(f"{name}.{TASKS[name].split}*.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.integration
@at_hand
@each("name", COUNTS)
def test_as_many_documents_and_requests_as_olmes_has(name: str) -> None:
    rows = subset(rows_of(name), TASKS[name])
    questions = {form: [TASKS[name].template.question(row, form) for row in rows] for form in ("cf", "mcf")}
    for form, asked in questions.items():
        assert (len(asked), sum(len(q.continuations) for q in asked)) == COUNTS[name], form
        assert all(len(q.contexts) == len(q.continuations) > q.gold >= 0 for q in asked)
        assert all(continuation.startswith(" ") for q in asked for continuation in q.continuations)


@at_hand
def test_no_choice_of_hellaswag_has_two_spaces() -> None:
    template = TASKS["hellaswag"].template
    assert not [row for row in rows_of("hellaswag") if "  " in template.question(row, "mcf").contexts[0]]


@at_hand
def test_the_subset_is_that_of_seed_1234() -> None:
    rows = rows_of("boolq")
    assert [row["idx"] for row in subset(rows, TASKS["boolq"])[:5]] == [3187, 1805, 478, 30, 371]
    piqa = rows_of("piqa")
    assert subset(piqa, TASKS["piqa"])[:5] == [piqa[i] for i in (1593, 902, 239, 15, 185)]
