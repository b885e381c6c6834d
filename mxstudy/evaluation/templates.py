"""Turn a data set's row into a question with OLMES' prompts, in cloze form or multiple choice (arXiv 2406.08446).

Cloze form (cf): each option is a continuation. Multiple choice (mcf): the prompt lists the options, and a letter is
the continuation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

DataSetRow = Mapping[str, Any]
LETTERS = "ABCDE"


@dataclass(frozen=True)
class Question:
    """A question: option i is scored by the log-likelihood of continuations[i] after contexts[i]; `gold` is right.

    Each continuation begins with one space. All contexts are equal, except WinoGrande's in cloze form. `shots`: the
    numbers of the rows whose solved questions are in the contexts.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int
    shots: tuple[int, ...] = ()

    @property
    def solved(self) -> str:
        """Return the question with its right answer, as used for a shot."""
        return self.contexts[self.gold] + self.continuations[self.gold]


@dataclass(frozen=True)
class Parsed:
    """A parsed row. `cloze`: the prompt of the cloze form. `choose`: the prompt that the list of options follows.

    `listed`: the options in that list, if they differ from those of the cloze form.
    """

    cloze: str
    choose: str
    options: tuple[str, ...]
    gold: int
    listed: tuple[str, ...] = ()


def labelled(row: DataSetRow) -> tuple[tuple[str, ...], int]:
    """Return the options and the index of the right one; ARC labels some of its options 1, 2, 3."""
    choices = row["choices"]
    return tuple(choices["text"]), list(choices["label"]).index(row["answerKey"])


def arc(row: DataSetRow) -> Parsed:
    ask = f"Question: {row['question']}"
    return Parsed(f"{ask}\nAnswer:", ask, *labelled(row))


def openbookqa(row: DataSetRow) -> Parsed:
    ask = f"Question: {row['question_stem']}"
    return Parsed(f"{ask}\nAnswer:", ask, *labelled(row))


def boolq(row: DataSetRow) -> Parsed:
    """Parse a row; label 1 means yes, which is option 0."""
    ask = f"{row['passage']}\nQuestion: {row['question']}?"
    return Parsed(f"{ask}\nAnswer:", ask, ("yes", "no"), 1 - int(row["label"]))


def hellaswag(row: DataSetRow) -> Parsed:
    """Parse a row with the public columns, or a row whose text is already clean: `query`, `endings`.

    The cloze form is cleaned part by part, multiple choice as a whole (`clean_choice`); cleaning the whole keeps spaces
    at line ends, which a row that is already clean has lost.
    """
    raw, as_is = tuple(row["endings"]), "query" in row
    ask = row["query"] if as_is else f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    query, endings = (ask, raw) if as_is else (clean(ask), tuple(map(clean, raw)))
    return Parsed(query, f"{ask}\nChoose the best continuation:", endings, int(row["label"]), listed=raw)


def clean(text: str) -> str:
    """Return the text without WikiHow's marks: [title] becomes the end of a sentence, all others are dropped."""
    text = re.sub(r"\.? \[title\]", ". ", text.strip())
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def mmlu(row: DataSetRow) -> Parsed:
    ask = f"Question: {row['question']}"
    return Parsed(f"{ask}\nAnswer:", ask, tuple(row["choices"]), int(row["answer"]))


def piqa(row: DataSetRow) -> Parsed:
    ask = f"Goal: {row['goal']}"
    return Parsed(f"{ask}\nAnswer:", ask, (row["sol1"], row["sol2"]), int(row["label"]))


def race(row: DataSetRow) -> Parsed:
    ask = f"{row['article']}\nQuestion: {row['question']}"
    return Parsed(f"{ask}\nAnswer:", ask, tuple(row["options"]), LETTERS.index(row["answer"]))


def socialiqa(row: DataSetRow) -> Parsed:
    ask = f"Question: {row['context']} {row['question']}"
    options = row["answerA"], row["answerB"], row["answerC"]
    return Parsed(f"{ask}\nAnswer:", ask, options, int(row["label"]) - 1)


def winogrande(row: DataSetRow) -> Parsed:
    """Parse a row; in cloze form, the sentence up to the filled blank is the context, the rest the continuation."""
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
    """Return the question with a description and solved questions before it, separated by blank lines."""
    before = [description] if description else []
    before += [shot.solved for shot in shots]
    contexts = tuple("\n\n".join([*before, context]) for context in question.contexts)
    return Question(contexts, question.continuations, question.gold)


def describe_mmlu(subject: str) -> str:
    """Return MMLU's description of a subject, used in both forms, with and without shots."""
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."


@dataclass(frozen=True)
class Template:
    parse: Callable[[DataSetRow], Parsed]
    cf: Callable[[Parsed], Question] = cloze
    mcf: Callable[[Parsed], Question] = multiple_choice

    def question(self, row: DataSetRow, form: str) -> Question:
        return (self.cf if form == "cf" else self.mcf)(self.parse(row))
