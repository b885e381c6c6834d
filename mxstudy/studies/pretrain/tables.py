"""Summarise a sweep of pre-training runs, on the terminal and in MLflow: a table and a figure of the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxstudy import results
from mxstudy.results.run_arms import ArmRow
from mxstudy.results.terminal import LEFT, grid
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import figures_of
from mxstudy.tracking.mlflow_parent import Summary

RUN_ID = "MLflow run"
SURVIVORS = "†"
LOSS = "validation_loss"


def summarise(named: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
    """Print a table with a row per arm and the path of their figure, and return both for MLflow.

    `baseline`: {config group: choice} of the arm that the others are compared with; {} means the first arm.
    """
    folders = list(named.values())
    runs = results.with_arms(results.load_runs(folders), baseline)
    rows = results.arm_rows(runs, LOSS)
    notes = [*no_baseline(rows, baseline), *legend(rows, baseline)]
    notes += [f"{name}: diverged, {folder.status().reason}" for name, folder in named.items() if has_diverged(folder)]
    entropies_nats = runs["unigram_entropy_nats"].dropna().unique()
    notes += [f"unigram entropy of the validation split: {nats:.4f} nats a token" for nats in entropies_nats]
    console = Console(highlight=False)
    console.print(terminal_table(rows, console.width, console.is_terminal))
    print("\n".join(notes))
    figure = draw_losses(folders, runs, figures_of(folders) / f"{folders[0].membership().experiment}.png")
    print(f"loss curves: {figure}", flush=True)
    return Summary("\n\n".join([markdown_table(rows), *notes]), [figure], in_one_line(rows))


def in_one_line(rows: Sequence[ArmRow]) -> str:
    """Return the mean loss of every arm, and how many of its runs diverged, for the sweep's row in MLflow."""
    lost = [f" ({row.lost} diverged)" if row.lost else "" for row in rows]
    means = [f"{row.arm} {row.mean.text('.4f')}{died}" for row, died in zip(rows, lost, strict=True)]
    return f"val loss: {', '.join(means)}"


def has_diverged(folder: RunFolder) -> bool:
    return folder.status().state == "diverged"


def no_baseline(rows: Sequence[ArmRow], baseline: Mapping[str, str]) -> list[str]:
    """Return a line if no run made the baseline's choices, so that the first of several arms takes its place."""
    runs, wanted = pd.concat([row.runs for row in rows]), {f"choice.{group}": one for group, one in baseline.items()}
    made = runs.reindex(columns=list(wanted)).eq(pd.Series(wanted, dtype=object)).all(axis="columns")
    return [] if made.any() or len(rows) == 1 else [f"baseline: no arm has {dict(baseline)}; using {rows[0].arm}"]


def legend(rows: Sequence[ArmRow], baseline: Mapping[str, str]) -> list[str]:
    """Return a line that explains losses and differences, and a footnote if a mean leaves out diverged runs."""
    partners = {row.partner for row in rows if row.difference is not None}
    choices = " ".join(f"{group}={choice}" for group, choice in baseline.items())
    other = next(iter(partners)) if len(partners) == 1 else f"the arm with {choices} and everything else the same"
    several = any(len(row.runs) > 1 for row in rows)
    mean = "mean of the runs that finished, ± 95 % interval over seeds (Student)" if several else "of the last step"
    paired = ", paired by seed" if several else ""
    less = f"; diff: minus that of {other}{paired}" if len(rows) > 1 else ""
    return [f"val loss: nats a token, {mean}{less}", *survivors(rows)]


def survivors(rows: Sequence[ArmRow]) -> list[str]:
    """Return a footnote if a mean is not over all runs of its arm; the footnote's sign stands behind the mean."""
    few = [f"{row.arm} {row.mean.count} of {len(row.runs)}" for row in rows if is_of_survivors(row)]
    return [f"{SURVIVORS} mean of the runs that did not diverge: {', '.join(few)}"] if few else []


def is_of_survivors(row: ArmRow) -> bool:
    return 0 < row.mean.count < len(row.runs)


def columns(rows: Sequence[ArmRow]) -> dict[str, list[str]]:
    """Return {column name: cells as text} of the table, for the terminal and for MLflow."""
    ids = [list(row.runs["mlflow_run_id"]) for row in rows]
    shown = {
        "arm": [row.arm for row in rows],
        "runs": [str(len(row.runs)) for row in rows],
        "diverged": [str(row.lost) for row in rows],
        "val loss": [row.mean.text(".4f") + SURVIVORS * is_of_survivors(row) for row in rows],
        "diff": [difference(row) for row in rows],
        "tokens/s": [f"{row.runs['tokens_per_s'].median():,.0f}" for row in rows],
    }
    if len(rows) == 1:  # there is nothing to compare it with
        del shown["diff"]
    if any(len(own) > 1 for own in ids):
        return shown
    return shown | {RUN_ID: [own[0] if isinstance(own[0], str) else "-" for own in ids]}


def difference(row: ArmRow) -> str:
    """Return the difference with its interval, and with the number of pairs if not every run of the arm has one."""
    if row.difference is None:
        return "baseline" if row.arm == row.partner else "-"
    few = 0 < row.difference.count < len(row.runs)
    pairs = f" ({row.difference.count} pair{'s' * (row.difference.count > 1)})" if few else ""
    return row.difference.text("+.4f") + pairs


def terminal_table(rows: Sequence[ArmRow], width: int, colored: bool = False) -> Table:
    """Return the table for a terminal of `width` columns; MLflow run ids are left out if they do not fit.

    `colored`: begin each arm with a square of its colour.
    """
    shown = columns(rows)
    widths = [max(map(len, [name, *cells])) + 1 for name, cells in shown.items()]
    if sum(widths) + 1 > width:
        shown.pop(RUN_ID, None)
    cells: dict[str, Sequence[str | Text]] = dict(shown)
    if colored:
        cells["arm"] = [Text.assemble(("■ ", row.color), row.arm) for row in rows]
    return grid(None, shown, zip(*cells.values(), strict=True))


def markdown_table(rows: Sequence[ArmRow]) -> str:
    shown = columns(rows)
    return results.markdown(shown, zip(*shown.values(), strict=True), LEFT)


def draw_losses(folders: Sequence[RunFolder], runs: pd.DataFrame, path: Path) -> Path:
    """Draw the loss by training tokens, one colour per arm, above its difference to the partner's at equal seeds.

    Lines: exponential mean of the training loss, the mean over seeds; bands: from the lowest to the highest seed.
    Points: validation loss. Thin lines that end in a cross: runs that diverged. Behind a single run: its raw loss.
    Returns the figure's absolute path.
    """
    from matplotlib.figure import Figure  # no pyplot, whose windows are the user's in a notebook

    rows = results.load_metrics(folders)
    points = points_of(rows, results.load_validations(folders))
    training, raw = (
        {own.arm: own for own in results.curves_of(rows, runs, "loss", "tokens", s)} for s in (True, False)
    )
    validation = {own.arm: own for own in results.curves_of(points, runs, LOSS, "tokens")} if len(points) else {}
    figure = Figure(figsize=(6, 4.8), layout="constrained")
    top, *bottom = results.draw_arms(figure, training.values(), raw, linewidth=1.4)
    for arm, own in validation.items():
        style = {"color": own.color, "markersize": 4, "label": "validation"}
        top.plot(own.alive.dropna().mean(axis=1), "o", **style)
        if bottom and own.partner in validation and own.partner != arm:
            bottom[0].plot(own.less(validation[own.partner]).dropna().mean(axis=1), "o", **style)
    for axes in (top, *bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    top.set_ylabel("loss, nats a token")
    results.legend(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    results.save_figure(figure, path, dpi=120)
    return path.resolve()


def points_of(rows: pd.DataFrame, validations: pd.DataFrame) -> pd.DataFrame:
    """Return the validations with the training tokens of their steps; none if every run diverged before the first."""
    steps = ["fingerprint", "step"]
    return validations.merge(rows[[*steps, "tokens"]], on=steps) if len(validations) else validations
