"""Make the parts of the page about zero-shot evaluation, from the answers to every question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial

import pandas as pd

from analysis.mxnorm.table02_zero_shot import QUESTION
from analysis.pages.language_models import LOSS, NORM_CHOICE, NORMS, before, loss_of
from analysis.pages.marks import Parts, least_and_most, rows_of
from analysis.units import SEED
from mxstudy import results

SEEDS = (0, 1)
OF_AVERAGE = "average of 9"
CHANCE = {  # {task: percent, by the number of options}
    **dict.fromkeys(("arc_challenge", "arc_easy", "hellaswag", "mmlu", "openbookqa"), "25"),
    **dict.fromkeys(("boolq", "piqa", "winogrande"), "50"),
    "csqa": "20",
    "socialiqa": "33.3",
}


@cache
def scores(seed: int) -> pd.DataFrame:
    """Return one row per task, form and norm of the models of one seed."""
    found = rows_of("scores", f"olmes_seed{seed}")
    trained = rows_of("runs", "olmes_training")
    norms = dict(zip(trained["fingerprint"].str[:12], trained[NORM_CHOICE], strict=True))
    return found.assign(norm=found["checkpoint"].str.split("/").str[0].map(norms))


@cache
def bits(seed: int, norm: str) -> pd.Series:
    """Return the bits per character of each question that has its own options, in cloze form."""
    samples = rows_of("samples", f"olmes_seed{seed}")
    (run,) = scores(seed).loc[scores(seed)["norm"] == norm, "fingerprint"].unique()
    own = samples[(samples["fingerprint"] == run) & (samples["form"] == "cf") & (samples["task"] == samples["group"])]
    return own.set_index(QUESTION)["bits_per_char"]


@cache
def less(ours: tuple[int, str], theirs: tuple[int, str], without: tuple[str, ...] = ()) -> str:
    """Return the difference of the average over tasks, with its 95 % interval over questions."""
    pair = pd.concat([bits(*ours), bits(*theirs)], axis=1, keys=["ours", "theirs"])
    pair = pair.drop(index=list(without), level="task")
    found = results.difference(
        [(own["ours"].tolist(), own["theirs"].tolist()) for _, own in pair.groupby(level="task")]
    )
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def average(norm: str, seed: int) -> pd.Series:
    own = scores(seed)[scores(seed)["norm"] == norm]
    (found,) = (row for _, row in own[own["task"] == OF_AVERAGE].tail(1).iterrows())
    return found


def averages() -> str:
    cells = [
        (said + (f": score, {OF_AVERAGE}" if norm == "rmsnorm" else ""), *score(norm)) for norm, said in NORMS.items()
    ]
    cells.append(
        (f"RMSNorm: bits per character, {OF_AVERAGE}", *(f"{mean_bits('rmsnorm', seed):.3f}" for seed in SEEDS))
    )
    for words, without in (("{} minus RMSNorm [95 %]", ()), ("without BoolQ: {} minus RMSNorm", ("boolq",))):
        for norm in ("mxnorm_p1", "mxnorm_p2"):
            differences = (less((seed, norm), (seed, "rmsnorm"), without) for seed in SEEDS)
            cells.append((words.format(NORMS[norm]), *differences))
    cells.append(("validation loss, nats a token: RMSNorm, p=1, p=2", *map(losses, SEEDS)))
    columns = ["", *(f"seed {seed}" for seed in SEEDS)]
    return results.markdown(columns, cells, left=columns)


def score(norm: str) -> Iterator[str]:
    for seed in SEEDS:
        row = average(norm, seed)
        yield results.plus_minus(100 * row["score"], 100 * row["stderr"], ".1f") + " %"


def mean_bits(norm: str, seed: int) -> float:
    own = scores(seed)[(scores(seed)["norm"] == norm) & (scores(seed)["form"] == "cf")]
    return float(own.loc[own["task"] == OF_AVERAGE, "bits_per_char"].iloc[0])


def losses(seed: int) -> str:
    runs = rows_of("runs", "olmes_training")
    of = runs[runs[SEED] == seed].set_index(NORM_CHOICE)[LOSS]
    return ", ".join(f"{of[norm]:.3f}" for norm in NORMS)


def between_seeds() -> str:
    cells = [(words, less((1, norm), (0, norm))) for norm, words in NORMS.items()]
    columns = ["seed 1 minus seed 0 of one norm", f"bits per character, {OF_AVERAGE}"]
    return results.markdown(columns, cells, left=columns)


def every_task() -> str:
    tasks: Sequence[str] = sorted(CHANCE)
    cells = []
    for task in tasks:
        own = [scores(seed)[scores(seed)["best"] & (scores(seed)["task"] == task)] for seed in SEEDS]
        error = max(100 * part["stderr"].max() for part in own)
        said = [
            ", ".join(
                f"{100 * row['score']:.1f} ({row['form']})"
                for part in own
                for _, row in part[part["norm"] == norm].iterrows()
            )
            for norm in NORMS
        ]
        cells.append((f"{task} (+- {error:.1f})", CHANCE[task], *said))
    columns = ["task", "chance", "RMSNorm, seeds 0, 1", *list(NORMS.values())[1:]]
    return results.markdown(columns, cells, left=columns)


def guessed() -> str:
    """Return the share of BoolQ's questions that have its more frequent answer."""
    samples = rows_of("samples", "olmes_seed0").query("task == 'boolq'")
    return f"{100 * samples['gold'].value_counts(normalize=True).max():.1f} %"


def of_boolq(axis: int) -> str:
    """Return the largest difference of BoolQ's bits between two models.

    They differ in the norm (axis 0) or in the seed (axis 1).
    """
    own = pd.DataFrame(
        {
            seed: scores(seed).query("task == 'boolq' and form == 'cf'").set_index("norm")["bits_per_char"]
            for seed in SEEDS
        }
    )
    return f"{(own.max(axis=axis) - own.min(axis=axis)).max():.2f}"


@cache
def of_scores() -> pd.Series:
    """Return MXNorm's score minus RMSNorm's in percentage points, by seed, task, form and norm."""
    parts = {}
    for seed in SEEDS:
        own = scores(seed)[scores(seed)["task"].isin(CHANCE)].pivot(
            index=["task", "form"], columns="norm", values="score"
        )
        parts[seed] = own.drop(columns="rmsnorm").sub(own["rmsnorm"], axis=0).stack()
    return 100 * pd.concat(parts)


def largest_of_scores() -> str:
    """Return the largest difference of scores with its p: '-3.8 points, p < 0.001'."""
    seed, task, form, norm = of_scores().abs().idxmax()
    samples = rows_of("samples", f"olmes_seed{seed}").query("task == @task and form == @form")
    norms = scores(seed).drop_duplicates("fingerprint").set_index("fingerprint")["norm"]
    answers = samples.assign(norm=samples["fingerprint"].map(norms)).pivot(
        index="document", columns="norm", values="right"
    )
    p = results.difference([(answers[norm].tolist(), answers["rmsnorm"].tolist())]).p
    assert p is not None
    return f"{of_scores()[seed, task, form, norm]:+.1f} points, p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}"


def then(norm: str) -> float:
    """Return the validation loss that the same fingerprint had before."""
    return loss_of(before(), 0, norm, "mxfp8")


def once_more() -> str:
    runs = rows_of("runs", "olmes_training")
    return least_and_most(pd.Series([abs(loss_of(runs, 0, norm) - then(norm)) for norm in NORMS]), ".3f")


ZERO_SHOT: Parts = {
    "averages": averages,
    "between seeds": between_seeds,
    "every task": every_task,
    "guessed": guessed,
    "BoolQ between norms": partial(of_boolq, 0),
    "BoolQ between seeds": partial(of_boolq, 1),
    "largest of scores": largest_of_scores,
    "tested": lambda: str(len(of_scores())),
    "losses then": lambda: ", ".join(f"{then(norm):.3f}" for norm in NORMS),
    "losses now": partial(losses, 0),
    "once more": once_more,
}
