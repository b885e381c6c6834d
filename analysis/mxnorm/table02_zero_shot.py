"""Zero-shot scores of several arms, and their differences paired by question (MXNorm paper, table 2).

Score: percent of right answers; bits: bits per character of the right answer; +- standard errors, except for a task
with a subject of one question, which has none. An average is the mean of the tasks' means. Differences from the first
arm or from --baseline have 95 % paired bootstrap intervals over questions; p is that of McNemar's exact test. The
figure shows the differences in bits: left of the line an arm is better.

python -m analysis.mxnorm.table02_zero_shot --runs runs/olmes [--baseline asked_in=rmsnorm]
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import ONE_COLUMN, caption, colors, figure_parser, load_chosen, plt, save, save_table
from mxstudy import results
from mxstudy.results import Difference, difference, plus_minus

NAMING = ("asked_in", "arm", "checkpoint", "fingerprint")  # arms are named by the first one that is unique
QUESTION = ["task", "form", "group", "document", "gold"]
SCORE, BITS = "right", "bits_per_char"  # columns with one number per question


def named(scores: pd.DataFrame) -> dict[str, str]:
    """Return the arm's name by fingerprint, without words that all arms share: 'mxnorm_p2' from 'mxnorm p=2, mxfp8'."""
    runs = scores.drop_duplicates("fingerprint").set_index("fingerprint", drop=False)
    column = next(column for column in NAMING if runs[column].is_unique)
    labels = [text.replace(" p=", "_p").replace("compute ", "compute=").replace(",", "") for text in runs[column]]
    words = {label: label.split() for label in labels}
    shared = set.intersection(*map(set, words.values())) if len(words) > 1 else set()
    names = (" ".join(word for word in words[label] if word not in shared) or label for label in labels)
    return dict(zip(runs.index, names, strict=True))


def baseline_arm(scores: pd.DataFrame, names: Mapping[str, str], chosen: str | None) -> str:
    """Return the name of the baseline arm. Raises ValueError unless `chosen`, COLUMN=WORDS, matches one arm."""
    if chosen is None:
        return next(iter(names.values()))
    column, _, words = chosen.partition("=")
    if column not in NAMING:
        raise ValueError(f"--baseline: {column!r} is not one of {', '.join(NAMING)}")
    texts = scores.drop_duplicates("fingerprint").set_index("fingerprint")[column]
    wanted = [names[run] for run, text in texts.items() if words_of(words) <= words_of(text)]
    if len(wanted) != 1:
        raise ValueError(f"--baseline: {chosen} matches {len(wanted)} arms, not one; there are {[*texts]}")
    return wanted[0]


def words_of(text: str) -> set[str]:
    return {*re.split(r"[,\s]+", text)}


def answers_of(samples: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Return one row per question, columns (measure, arm). Raises ValueError if the arms' questions differ."""
    scored = samples[samples["fingerprint"].isin(names)]  # an evaluation that has not ended has no scores
    asked = scored.assign(arm=scored["fingerprint"].map(names))
    if asked.duplicated(["arm", *QUESTION]).any():
        raise ValueError("--runs: a run is given twice")
    answers = asked.pivot(index=QUESTION, columns="arm", values=[SCORE, BITS])
    alone = answers[SCORE].isna().any(axis=1)
    if alone.any():
        tasks = ", ".join(answers[alone].index.unique("task"))
        raise ValueError(f"--runs: {alone.sum():,} questions of {tasks} were not asked of every arm; leave out an arm")
    return answers.astype(float)


def form_of_bits(scores: pd.DataFrame) -> str:
    """Return the form whose bits are compared: cloze if available, since in multiple choice the answer is a letter."""
    return "cf" if "cf" in set(scores["form"]) else scores["form"].iloc[0]


def score_cells(scores: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield (task, percentage of right answers in the better form) of one arm, and last their average."""
    averages = scores["task"].str.startswith("average")
    for _, row in pd.concat([scores[scores["best"] & ~averages], scores[averages].tail(1)]).iterrows():
        yield row["task"], f"{plus_minus(100 * row['score'], 100 * row['stderr'], '.1f')} ({row['form']})"


def bits_cells(scores: pd.DataFrame) -> Iterator[tuple[str, str]]:
    for _, row in scores[scores["form"] == form_of_bits(scores)].iterrows():
        yield row["task"], plus_minus(row["bits_per_char"], row["bits_per_char_stderr"], ".3f")


def by_arm(scores: pd.DataFrame, unit: str, cells: Callable[[pd.DataFrame], Iterator[tuple[str, str]]]) -> pd.DataFrame:
    """Return a table with one row per task and one column per arm."""
    columns = {f"{arm}: {unit}": dict(cells(own)) for arm, own in scores.groupby("arm", sort=False)}
    table = pd.DataFrame(columns)
    table.insert(0, "questions", scores.groupby("task")["documents"].first().map("{:,}".format))
    return table


def score_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the scores in the better form by arm, beside those of guessing, which older tables do not have."""
    table = by_arm(scores, "right, % (form)", score_cells)
    if "chance" in scores:
        shares = scores.groupby("task")["chance"].first()
        table.insert(1, "by guessing, %", shares.map(lambda share: f"{100 * share:.1f}"))
    return table


def markdown(table: pd.DataFrame) -> str:
    return results.markdown(["task", *table], table.itertuples(name=None), left=["task"]) + "\n"


def differences(answers: pd.DataFrame, arm: str, baseline: str, measure: str, form: str) -> dict[str, Difference]:
    """Return the differences by task in one form.

    For bits, the last one is their mean over tasks without subjects.
    """
    pair = answers[measure][[arm, baseline]].xs(form, level="form")
    by_task = {task: groups_of(own, "group") for task, own in pair.groupby("task")}
    found = {task: difference(groups) for task, groups in by_task.items()}
    single = pair[pair.index.get_level_values("task") == pair.index.get_level_values("group")]
    groups = groups_of(single, "task")
    return found | ({f"average of {len(groups)}": difference(groups)} if measure == BITS and len(groups) > 1 else {})


def groups_of(pair: pd.DataFrame, level: str) -> list[tuple[list[float], list[float]]]:
    return [(own.iloc[:, 0].tolist(), own.iloc[:, 1].tolist()) for _, own in pair.groupby(level=level)]


def difference_table(answers: pd.DataFrame, arm: str, baseline: str, bits: Mapping[str, Difference], form: str) -> str:
    """Return a Markdown table with one row per task: differences of scores and p in every form, and of bits in one."""
    columns = {"questions": {task: f"{one.documents:,}" for task, one in bits.items()}}
    for each in answers.index.unique("form"):
        scores = differences(answers, arm, baseline, SCORE, each)
        columns[f"{each}: score, percentage points"] = {task: one.shown(100, 1) for task, one in scores.items()}
        columns[f"{each}: p"] = {task: shown_p(one.p) for task, one in scores.items()}
    columns[f"{form}: bits per character"] = {task: one.shown() for task, one in bits.items()}
    return markdown(pd.DataFrame(columns).loc[list(bits)].fillna("-"))


def shown_p(p: float | None) -> str:
    if p is None:
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def draw(bits: Mapping[str, Mapping[str, Difference]], baseline: str) -> Figure:
    """Draw the differences in `bits`, by arm and task. The average is set apart below the tasks."""
    tasks = list(next(iter(bits.values())))
    heights = {task: -place - 0.5 * task.startswith("average") for place, task in enumerate(tasks)}
    figure, axes = plt.subplots(figsize=(ONE_COLUMN, 0.9 + 0.28 * len(tasks)))
    color = colors(bits)
    for number, (arm, found) in enumerate(bits.items()):
        offset = 0.5 * ((len(bits) - 1) / 2 - number) / len(bits)
        values, lows, highs = zip(*((one.value, one.low, one.high) for one in found.values()), strict=True)
        places = [heights[task] + offset for task in found]
        axes.hlines(places, lows, highs, color=color[arm], linewidth=1.4)
        axes.plot(values, places, "o", color=color[arm], markersize=4, label=arm)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(list(heights.values()), tasks)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"bits per character of the right answer,\nminus those of {baseline} (below 0: better)")
    results.legend(figure)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser("mxnorm_table02_zero_shot", __doc__)
    help_text = f"the arm to compare with; COLUMN is one of {', '.join(NAMING)}, such as asked_in=rmsnorm"
    options.add_argument("--baseline", metavar="COLUMN=WORDS", help=help_text)
    chosen = options.parse_args(arguments)
    scores, samples = load_chosen(options, chosen, "scores", "samples")
    names = named(scores)
    with options.usage_errors():
        baseline = baseline_arm(scores, names, chosen.baseline)
        answers = answers_of(samples, names)
    report(scores.assign(arm=scores["fingerprint"].map(names)), answers, baseline, chosen)


def report(scores: pd.DataFrame, answers: pd.DataFrame, baseline: str, chosen: Namespace) -> None:
    form, arms = form_of_bits(scores), [arm for arm in scores["arm"].unique() if arm != baseline]
    bits = {arm: differences(answers, arm, baseline, BITS, form) for arm in arms}
    by_bits = by_arm(scores, "bits", bits_cells)
    whose = scores["arm"] + " = " + scores["checkpoint"] + " in " + scores["asked_in"]
    parts = [
        caption(scores.assign(arm=whose), __doc__, chosen.runs),
        f"**Score in the better form**\n\n{markdown(score_table(scores))}",
        f"**Bits per character of the right answer ({form}), lower is better**\n\n{markdown(by_bits)}",
    ]
    for arm in arms:
        table = difference_table(answers, arm, baseline, bits[arm], form)
        parts.append(f"**{arm} minus {baseline} [95 % interval]**\n\n{table}")
    if arms:
        save(draw(bits, baseline), chosen, "\n".join(parts))
    else:
        save_table("\n".join(parts), chosen.name)


if __name__ == "__main__":
    main()
