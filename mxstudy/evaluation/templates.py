"""OLMES prompts: a row of a data set to a question, in cloze form or as multiple choice (OLMES, arXiv 2406.08446).

Cloze form (cf): each option is a continuation. Multiple choice (mcf): the options are in the prompt, a letter follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Row = Mapping[str, Any]
LETTERS = "ABCDE"


@dataclass(frozen=True)
class Question:
    """Option i is scored by the log-likelihood of continuations[i] after contexts[i]; `gold` is the right one.

    Continuations begin with their one space. All contexts are equal but for WinoGrande's in cloze form.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int

    @property
    def solved(self) -> str:
        """With its right answer, as a shot."""
        return self.contexts[self.gold] + self.continuations[self.gold]


@dataclass(frozen=True)
class Parsed:
    """What a data set's row says: `cloze` is the prompt without options, `choose` the one that options follow.

    `listed`: the options as they follow, where they are others than those of the cloze form.
    """

    cloze: str
    choose: str
    options: tuple[str, ...]
    gold: int
    listed: tuple[str, ...] = ()


def labelled(row: Row) -> tuple[tuple[str, ...], int]:
    """Options and the right one's index; ARC labels some of its options 1, 2, 3."""
    choices = row["choices"]
    return tuple(choices["text"]), list(choices["label"]).index(row["answerKey"])


def arc(row: Row) -> Parsed:
    ask = f"Question: {row['question']}"
    return Parsed(f"{ask}\nAnswer:", ask, *labelled(row))


def openbookqa(row: Row) -> Parsed:
    ask = f"Question: {row['question_stem']}"
    return Parsed(f"{ask}\nAnswer:", ask, *labelled(row))


def boolq(row: Row) -> Parsed:
    """Label 1 is yes, which is option 0."""
    ask = f"{row['passage']}\nQuestion: {row['question']}?"
    return Parsed(f"{ask}\nAnswer:", ask, ("yes", "no"), 1 - int(row["label"]))


def hellaswag(row: Row) -> Parsed:
    """From the public columns, or from a row whose text is clean already: `query`, `endings`.

    The cloze form is clean part by part, multiple choice as a whole (`clean_choice`), spaces at its lines' ends
    included, which a row that is clean already has lost.
    """
    raw, as_is = tuple(row["endings"]), "query" in row
    ask = row["query"] if as_is else f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    query, endings = (ask, raw) if as_is else (clean(ask), tuple(map(clean, raw)))
    return Parsed(query, f"{ask}\nChoose the best continuation:", endings, int(row["label"]), listed=raw)


def clean(text: str) -> str:
    """WikiHow's marks out of it: [title] ends a sentence, every other is dropped."""
    text = re.sub(r"\.? \[title\]", ". ", text.strip())
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def mmlu(row: Row) -> Parsed:
    ask = f"Question: {row['question']}"
    return Parsed(f"{ask}\nAnswer:", ask, tuple(row["choices"]), int(row["answer"]))


def piqa(row: Row) -> Parsed:
    ask = f"Goal: {row['goal']}"
    return Parsed(f"{ask}\nAnswer:", ask, (row["sol1"], row["sol2"]), int(row["label"]))


def race(row: Row) -> Parsed:
    ask = f"{row['article']}\nQuestion: {row['question']}"
    return Parsed(f"{ask}\nAnswer:", ask, tuple(row["options"]), LETTERS.index(row["answer"]))


def socialiqa(row: Row) -> Parsed:
    ask = f"Question: {row['context']} {row['question']}"
    options = row["answerA"], row["answerB"], row["answerC"]
    return Parsed(f"{ask}\nAnswer:", ask, options, int(row["label"]) - 1)


def winogrande(row: Row) -> Parsed:
    """In cloze form the sentence up to the blank, which the options fill, is context; its rest the continuation."""
    ask = f"Fill in the blank: {row['sentence'].replace('_', '___')}"
    return Parsed(row["sentence"], ask, (row["option1"], row["option2"]), int(row["answer"]) - 1)


def cloze(parsed: Parsed) -> Question:
    contexts = (parsed.cloze,) * len(parsed.options)
    return Question(contexts, tuple(f" {option}" for option in parsed.options), parsed.gold)


def fill_the_blank(parsed: Parsed) -> Question:
    before, _, after = parsed.cloze.partition("_")
    continuation = f" {after.strip()}"
    contexts = tuple(before + option for option in parsed.options)
    return Question(contexts, (continuation,) * len(contexts), parsed.gold)


def multiple_choice(parsed: Parsed) -> Question:
    letters = LETTERS[: len(parsed.options)]
    lines = [f" {letter}. {option}" for letter, option in zip(letters, parsed.listed or parsed.options, strict=True)]
    context = "\n".join([parsed.choose, *lines, "Answer:"])
    return Question((context,) * len(letters), tuple(f" {letter}" for letter in letters), parsed.gold)


def clean_choice(parsed: Parsed) -> Question:
    question = multiple_choice(parsed)
    return replace(question, contexts=tuple(map(clean, question.contexts)))


def with_shots(question: Question, shots: Iterable[Question], description: str | None = None) -> Question:
    """The same question after a description and solved ones, blank lines between."""
    before = [description] if description else []
    before += [shot.solved for shot in shots]
    contexts = tuple("\n\n".join([*before, context]) for context in question.contexts)
    return Question(contexts, question.continuations, question.gold)


def describe_mmlu(subject: str) -> str:
    """Said in both forms, and without shots too."""
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."


@dataclass(frozen=True)
class Template:
    parse: Callable[[Row], Parsed]
    cf: Callable[[Parsed], Question] = cloze
    mcf: Callable[[Parsed], Question] = multiple_choice

    def question(self, row: Row, form: str) -> Question:
        return (self.cf if form == "cf" else self.mcf)(self.parse(row))
