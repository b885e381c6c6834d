"""Scores over training: MMLU (left) and the average of nine tasks (right), by tokens (MXFP8 recipe, figure 5, bottom).

Lines: means over seeds; bands: from the lowest to the highest seed. Dashed: the score of guessing. Each point is an
evaluation of a checkpoint by +experiment=nvidia_reasoning, in the norm and precision of its training, or one beside the
training, with +evaluation=reasoning and evaluation.every_steps; of several at the same tokens it is the last. --only
and --without choose trainings, with their evaluations.

python -m analysis.recipe.fig05_reasoning --runs runs/mxfp8_vs_bf16 runs/nvidia_reasoning
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis.command import command
from analysis.style import TWO_COLUMNS, load_chosen, load_or_none, make_figure, plt
from mxstudy import results
from mxstudy.results import ConfigError, curves_of, draw_arm, in_tokens, legend

SHOTS, LIMIT = "config.evaluation.shots", "config.evaluation.limit"
# {name of a score in an evaluation: what it is, and the key of its shots, if they are not those of all tasks}
PANELS = {
    "mmlu.mcf": ("MMLU", "config.evaluation.task_shots.mmlu"),
    "average_of_9.cf": ("average of nine tasks", SHOTS),
}
ADVICE = "evaluate checkpoints by +experiment=nvidia_reasoning, or train with +evaluation=reasoning"


def read(paths: Sequence[Path], kind: str) -> pd.DataFrame:
    """Return the rows of trainings: "runs", or "evaluation" with the shots of each of PANELS as NAME/shots.

    An evaluation of a checkpoint is a row of its training, unless its norm, precision or compute was another. Raises
    ConfigError if there is no training or no evaluation.
    """
    runs = results.load(paths, "runs")
    studies = runs.get("config.study", pd.Series("", runs.index))
    trained, evaluated = (runs[studies == study] for study in ("pretrain", "evaluate"))
    if trained.empty:
        raise ConfigError(
            "--runs: has no training, which has the arm and the tokens of a checkpoint; give its folder too, such as "
            "runs/mxfp8_vs_bf16 beside runs/nvidia_reasoning"
        )
    if kind == "runs":
        return trained
    found = [rows for path in paths if (rows := load_or_none([path], kind)) is not None]
    if not found:
        raise ConfigError(f"--runs: none of these runs was evaluated; {ADVICE}")
    rows = pd.concat(found, ignore_index=True)
    configs = runs.drop_duplicates("fingerprint").set_index("fingerprint")
    shots = {name: configs.get(key, configs[SHOTS]).fillna(configs[SHOTS]) for name, (_, key) in PANELS.items()}
    rows = rows.assign(**{f"{name}/shots": rows["fingerprint"].map(own) for name, own in shots.items()})
    if LIMIT in configs:
        rows = rows.assign(limit=rows["fingerprint"].map(configs[LIMIT]))
    return beside_trainings(rows, trained, evaluated)


def beside_trainings(rows: pd.DataFrame, trained: pd.DataFrame, evaluated: pd.DataFrame) -> pd.DataFrame:
    """Return rows of evaluations under the fingerprints of their trainings, at the last step before a checkpoint."""
    as_trained = evaluated.filter(regex=r"^config\.(norm|precision|compute)\b").isna().all(axis="columns")
    trainings = {name[:12]: name for name in trained["fingerprint"]}
    owners = {name: name for name in trainings.values()} | {
        run["fingerprint"]: trainings.get(Path(run["config.checkpoint"]).parent.parent.name[:12])
        for run in evaluated[as_trained].to_dict("records")
    }
    steps = rows["step"] - rows["fingerprint"].isin(evaluated["fingerprint"])  # a checkpoint knows the next step
    return rows.assign(fingerprint=rows["fingerprint"].map(owners), step=steps).dropna(subset="fingerprint")


def draw(rows: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    """Draw the figure.

    `rows` have fingerprint, tokens, limit, and for each of PANELS NAME/score, NAME/chance and NAME/shots. Raises
    ValueError if no run has one of these, if runs were asked with different numbers of shots or limits of questions, or
    if two runs of an arm have equal seeds.
    """
    figure, panels = plt.subplots(1, len(PANELS), figsize=(TWO_COLUMNS, 2.4))
    for axes, (name, (words, _)) in zip(panels, PANELS.items(), strict=True):
        asked = rows.dropna(subset=f"{name}/score") if f"{name}/score" in rows else rows[:0]
        if asked.empty:
            raise ValueError(f"--runs: no run was asked {name}; {ADVICE}")
        shots = asked[f"{name}/shots"].unique()
        if len(shots) > 1:
            found = " and ".join(f"{number:g}" for number in shots)
            raise ValueError(f"--runs: {name} was asked with {found} shots; choose evaluations, or trainings by --only")
        if "limit" in asked and asked["limit"].fillna("all").nunique() > 1:
            raise ValueError(f"--runs: {name} was asked with several values of evaluation.limit; choose by --only")
        percent = asked.assign(percent=100 * asked[f"{name}/score"]).sort_values("tokens", kind="stable")
        for curves in curves_of(percent, runs, "percent", "tokens"):
            draw_arm(axes, curves, marker=".")
        chance = 100 * asked[f"{name}/chance"].iloc[0]
        axes.axhline(chance, color="0.5", linewidth=0.8, linestyle="--", label="one who guesses")
        axes.set(title=f"{words}, {int(shots[0])} shot{'' if shots[0] == 1 else 's'}", ylabel="right, %")
        in_tokens(axes)
    legend(figure)
    return figure


@command
def main(arguments: Sequence[str] | None = None) -> None:
    query = partial(load_chosen, read=read)
    make_figure("mxfp8_fig05_reasoning", __doc__, arguments, draw, "evaluation", "runs", query=query)


if __name__ == "__main__":
    main()
