"""The parts of the page about zero-shot evaluation, from the answers to every question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pandas as pd

from analysis.pages.language_models import LOSS, NORM, NORMS, SEED
from analysis.pages.marks import Parts, rows_of
from mxstudy import results

QUESTION = ["task", "form", "group", "document", "gold"]
SEEDS = (0, 1)
OF_AVERAGE = "average of 9"
CHANCE = {  # percent, by the number of options
    **dict.fromkeys(("arc_challenge", "arc_easy", "hellaswag", "mmlu", "openbookqa"), "25"),
    **dict.fromkeys(("boolq", "piqa", "winogrande"), "50"),
    "csqa": "20",
    "socialiqa": "33.3",
}


@cache
def scores(seed: int) -> pd.DataFrame:
    """Return one row per task, form and norm of the models of one seed."""
    found = rows_of("scores", f"olmes_seed{seed}")
    runs = dict(zip(found["fingerprint"].unique(), NORMS, strict=True))
    return found.assign(norm=found["fingerprint"].map(runs))


@cache
def bits(seed: int, norm: str) -> pd.Series:
    """Return the bits per character of each question with options of its own in cloze form."""
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
        (f"{NORMS[norm]}" + (f": score, {OF_AVERAGE}" if norm == "rmsnorm" else ""), *score(norm)) for norm in NORMS
    ]
    cells.append(
        (f"RMSNorm: bits per character, {OF_AVERAGE}", *(f"{mean_bits('rmsnorm', seed):.3f}" for seed in SEEDS))
    )
    for words, without in (("{} less RMSNorm [95 %]", ()), ("without BoolQ: {} less RMSNorm", ("boolq",))):
        for norm in ("mxnorm_p1", "mxnorm_p2"):
            differences = (less((seed, norm), (seed, "rmsnorm"), without) for seed in SEEDS)
            cells.append((words.format(NORMS[norm]), *differences))
    cells.append(("validation loss, nats a token: RMSNorm, p=1, p=2", *map(losses, SEEDS)))
    columns = ["", *(f"seed {seed}" for seed in SEEDS)]
    return results.markdown(columns, cells, left=columns)


def score(norm: str) -> Iterator[str]:
    for seed in SEEDS:
        row = average(norm, seed)
        yield f"{100 * row['score']:.1f} +- {100 * row['stderr']:.1f} %"


def mean_bits(norm: str, seed: int) -> float:
    own = scores(seed)[(scores(seed)["norm"] == norm) & (scores(seed)["form"] == "cf")]
    return float(own.loc[own["task"] == OF_AVERAGE, "bits_per_char"].iloc[0])


def losses(seed: int) -> str:
    runs = rows_of("runs", "olmes_training")
    of = runs[runs[SEED] == seed].set_index(NORM)[LOSS]
    return ", ".join(f"{of[norm]:.3f}" for norm in NORMS)


def between_seeds() -> str:
    cells = [(words, less((1, norm), (0, norm))) for norm, words in NORMS.items()]
    columns = ["seed 1 less seed 0 of one norm", f"bits per character, {OF_AVERAGE}"]
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


ZERO_SHOT: Parts = {
    "averages": averages,
    "between seeds": between_seeds,
    "every task": every_task,
}
