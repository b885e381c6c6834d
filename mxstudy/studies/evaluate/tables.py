"""Tables of an evaluation: the scores of one checkpoint, and paired differences between several checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from mxstudy import results
from mxstudy.config import Evaluate
from mxstudy.evaluation.paired import Difference, difference
from mxstudy.results.terminal import markdown, show
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary

SCORES = ("task", "form", "score %", "chance %", "bits/char", "questions")
DIFFERENCES = ("task", "form", "score", "p", "bits/char")


def show_scores(folder: RunFolder) -> None:
    """Print the share of right answers in percent, the share by guessing, and the bits per character of the right one.

    Score and bits per character have a standard error, after +-.
    """
    cells = score_rows(folder)
    notes = ["*: the better form of a task"] if any(form.endswith("*") for _, form, *_ in cells) else []
    show("zero-shot scores" if no_shots(folder) else "scores", SCORES, cells, notes)


def no_shots(folder: RunFolder) -> bool:
    """Return whether all tasks of the run are zero-shot."""
    evaluation = folder.config_of(Evaluate).evaluation
    return not any(evaluation.shots_of(task) for task in evaluation.tasks)


def rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return frame.to_dict("records")


def score_rows(folder: RunFolder) -> list[tuple[str, ...]]:
    """Return the rows of the score table as text, with a star at a task's better form if there are two."""
    scores = results.load_table([folder], "scores")
    starred = scores["best"] & (scores.groupby("task")["form"].transform("nunique") > 1) & (scores["form"] != "best")
    return [score_cells(row, star) for row, star in zip(rows(scores), starred, strict=True)]


def score_cells(row: Mapping[str, Any], star: bool) -> tuple[str, ...]:
    score = results.plus_minus(100 * row["score"], 100 * row["stderr"], ".1f")
    bits = results.plus_minus(row["bits_per_char"], row["bits_per_char_stderr"], ".3f")
    chance = f"{100 * row['chance']:.1f}" if "chance" in row else "-"  # older tables do not have it
    return row["task"], row["form"] + "*" * star, score, chance, bits, f"{row['documents']:,}"


def summarise(runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
    """Print each checkpoint's scores minus those of the baseline, on their common questions, and return all tables.

    The baseline is the first checkpoint with the choices in `baseline`, else the first of all.
    """
    arms = named(runs)
    against = baseline_arm(arms, baseline)
    theirs = results.load_samples([arms[against]])
    parts = []
    for label, folder in arms.items():
        if label != against:
            ours = results.load_samples([folder])
            cells = [difference_cells(*row) for row in differences(ours, theirs)]
            title = f"{label} minus {against}: 95 % paired bootstrap interval, McNemar's exact p"
            show(title, DIFFERENCES, cells, [])
            parts.append(markdown(title, DIFFERENCES, cells))
    own = [score_table(label, folder) for label, folder in arms.items()]
    return Summary("\n\n".join([*own, *parts]))


def named(runs: Mapping[str, RunFolder], table: str = "scores") -> Mapping[str, RunFolder]:
    """Return {name: folder}, named by the norm and precision of the evaluation if these differ, else as they are."""
    names = [results.load_table([folder], table)["asked_in"][0] for folder in runs.values()]
    return dict(zip(names, runs.values(), strict=True)) if len(set(names)) == len(names) else runs


def score_table(label: str, folder: RunFolder) -> str:
    return markdown(label, SCORES, score_rows(folder))


def baseline_arm(arms: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> str:
    """Return the label of the first arm with those choices; if no arm has them, print a line and return the first."""
    for label, folder in arms.items():
        choices = folder.membership().choices
        if baseline and all(choices.get(group) == choice for group, choice in baseline.items()):
            return label
    first = next(iter(arms))
    if baseline:
        print(f"baseline: no arm has {dict(baseline)}; using {first}")
    return first


def differences(ours: pd.DataFrame, theirs: pd.DataFrame) -> Iterator[tuple[str, str, Difference, Difference]]:
    """Yield task, form, and the differences in score and in bits per character of the right answers."""
    keys = ["task", "form", "group", "document"]
    both = ours.merge(theirs, on=keys, suffixes=("", "_theirs"), validate="one_to_one")
    for (task, form), asked in both.groupby(["task", "form"], sort=False):
        groups = [own for _, own in asked.groupby("group")]
        yield (
            task,
            form,
            *(
                difference([(own[measure].tolist(), own[f"{measure}_theirs"].tolist()) for own in groups])
                for measure in ("right", "bits_per_char")
            ),
        )


def difference_cells(task: str, form: str, score: Difference, bits: Difference) -> tuple[str, ...]:
    return task, form, score.shown(100, 1), f"{score.p:.3f}", bits.shown()
