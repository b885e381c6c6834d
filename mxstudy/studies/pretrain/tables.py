"""Summarise a sweep of pre-training runs, on the terminal and in MLflow: a table and a figure of the losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from mxstudy import results
from mxstudy.results.terminal import LEFT, grid
from mxstudy.tracking.arms import short
from mxstudy.tracking.folder import REHEARSALS, RunFolder
from mxstudy.tracking.mlflow_parent import Summary

FIGURES = Path("figures")
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito


def summarise(arms: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
    """Print the table of the arms and the path of their figure; returns both for MLflow.

    `baseline`: {config group: choice} of the arm that the others are compared with; {} means the first arm.
    """
    arms = {short(label): folder for label, folder in arms.items()}
    runs = results.load_runs(list(arms.values())).assign(label=list(arms))
    against = baseline_arm(runs, baseline)
    folders = list(arms.values())
    notes = [f"diff: validation loss minus that of {against['label']}; losses in nats a token"]
    notes += [f"{label}: diverged, {folder.status().reason}" for label, folder in arms.items() if has_diverged(folder)]
    entropies_nats = runs["unigram_entropy_nats"].dropna().unique()
    notes += [f"unigram entropy of the validation split: {nats:.4f} nats a token" for nats in entropies_nats]
    console = Console(highlight=False)
    console.print(terminal_table(runs, against, console.width))
    print("\n".join(notes))
    place = FIGURES / REHEARSALS if any(folder.is_rehearsal for folder in folders) else FIGURES
    figure = draw_losses(arms, against, place / f"{folders[0].config().experiment}.png")
    print(f"loss curves: {figure}", flush=True)
    return Summary("\n\n".join([markdown_table(runs, against), *notes]), [figure])


def has_diverged(folder: RunFolder) -> bool:
    return folder.status().state == "diverged"


def baseline_arm(runs: pd.DataFrame, baseline: Mapping[str, str]) -> pd.Series:
    """Return the first run with those choices; if no run has them, print a line and return the first run."""
    choices = {f"choice.{group}": choice for group, choice in baseline.items()}
    fits = runs.reindex(columns=list(choices)).eq(pd.Series(choices, dtype=object)).all(axis="columns")
    if not fits.any():
        print(f"baseline: no arm has {dict(baseline)}; using {runs['label'].iloc[0]}")
        return runs.iloc[0]
    return runs[fits].iloc[0]


def columns(runs: pd.DataFrame, baseline: pd.Series) -> dict[str, list[str]]:
    """Return {column name: cells as text} of the table, for the terminal and for MLflow."""
    states = ["" if state == "finished" else f" ({state})" for state in runs["state"]]
    losses = runs["validation_loss"]
    return {
        "arm": [label + state for label, state in zip(runs["label"], states, strict=True)],
        "val loss": [number(loss, ".4f") for loss in losses],
        "diff": [number(loss - baseline["validation_loss"], "+.4f") for loss in losses],
        "tokens/s": [f"{rate:,.0f}" for rate in runs["tokens_per_s"]],
        "MLflow run": [run_id if isinstance(run_id, str) else "-" for run_id in runs["mlflow_run_id"]],
    }


def number(value: float, form: str) -> str:
    """Return the formatted value, or a dash for NaN: a diverged run has no validation loss."""
    return "-" if math.isnan(value) else format(value, form)


def terminal_table(runs: pd.DataFrame, baseline: pd.Series, width: int) -> Table:
    """Return the table for a terminal of `width` columns; MLflow run ids are left out if they do not fit."""
    shown = columns(runs, baseline)
    widths = [max(map(len, [name, *cells])) + 1 for name, cells in shown.items()]
    if sum(widths) + 1 > width:
        del shown["MLflow run"]
    return grid(None, shown, zip(*shown.values(), strict=True))


def markdown_table(runs: pd.DataFrame, baseline: pd.Series) -> str:
    shown = columns(runs, baseline)
    return results.markdown(shown, zip(*shown.values(), strict=True), LEFT)


def draw_losses(arms: Mapping[str, RunFolder], baseline: pd.Series, path: Path) -> Path:
    """Draw loss by training tokens, one colour per arm, above its difference to the baseline's at the same tokens.

    Lines: exponential mean of the training loss, with the raw loss faint behind it. Points: validation loss. Returns
    the figure's absolute path.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter

    losses = [load_losses(list(arms.values()), name) for name in ("loss", "validation_loss")]
    differences = [frame.sub(frame[baseline["fingerprint"]], axis="index") for frame in losses]
    figure, panels = plt.subplots(2, sharex=True, figsize=(6, 4.8), height_ratios=(3, 2), layout="constrained")
    for axes, (training, validation) in zip(panels, (losses, differences), strict=True):
        for (label, folder), color in zip(arms.items(), cycle(COLORS), strict=False):
            arm = folder.status().fingerprint
            loss = training[arm].dropna()
            axes.plot(loss, color=color, linewidth=0.6, alpha=0.25)
            axes.plot(results.smoothed(loss), color=color, linewidth=1.4, label=label)
            axes.plot(validation[arm].dropna(), "o", color=color, markersize=4)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss, nats a token")
    panels[0].legend(title="line: training; point: validation", frameon=False)
    panels[1].set(xlabel="training tokens", ylabel=f"minus that of\n{baseline['label']}")
    panels[1].xaxis.set_major_formatter(EngFormatter())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.resolve()


def load_losses(folders: list[RunFolder], name: str) -> pd.DataFrame:
    """Return losses with one row per number of training tokens and one column per fingerprint; NaN where missing."""
    rows, validations = results.load_metrics(folders), results.load_validations(folders)
    if len(validations):  # empty if every run has diverged
        rows = rows.merge(validations, how="left", on=["fingerprint", "step"])
    rows = rows.reindex(columns=["tokens", "fingerprint", name])
    return rows.pivot(index="tokens", columns="fingerprint", values=name)
