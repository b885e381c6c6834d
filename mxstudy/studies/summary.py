"""What a sweep of pre-training runs says at its end: one table, one figure of its loss curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from mxstudy import results
from mxstudy.tracking.folder import RunFolder

FIGURES = Path("figures")


def summarize(arms: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> None:
    """Print the table of the arms, by label, and the path of their figure.

    `baseline`: the choices by config group of the arm that the others are compared with; {}: the first.
    """
    arms = {short(label): folder for label, folder in arms.items()}
    runs = results.load_runs(list(arms.values())).assign(label=list(arms))
    Console(highlight=False).print(table(runs, baseline_arm(runs, baseline)))
    for entropy_nats in runs["unigram_entropy_nats"].dropna().unique():
        print(f"unigram entropy of the validation split: {entropy_nats:.4f} nats a token")
    experiment = next(iter(arms.values())).config().experiment
    print(f"loss curves: {draw_losses(arms, FIGURES / f'{experiment}.png')}", flush=True)


def short(label: str) -> str:
    """'precision=mxfp8 norm=rmsnorm' as 'mxfp8 rmsnorm': these choices say what they are."""
    return label.replace("norm=", "").replace("precision=", "")


def baseline_arm(runs: pd.DataFrame, baseline: Mapping[str, str]) -> pd.Series:
    """The first run with those choices, or the first of all where none has them."""
    fits = pd.Series(True, index=runs.index)
    for group, choice in baseline.items():
        fits &= runs[f"choice.{group}"] == choice
    return runs[fits].iloc[0] if fits.any() else runs.iloc[0]


def table(runs: pd.DataFrame, baseline: pd.Series) -> Table:
    caption = f"diff: validation loss less that of {baseline['label']}; losses in nats a token"
    shown = Table("arm", box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for name in ("val loss", "diff", "tokens/s"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("MLflow run", no_wrap=True)
    for run in runs.to_dict("records"):
        state = "" if run["state"] == "finished" else f" ({run['state']})"
        shown.add_row(
            run["label"] + state,
            f"{run['validation_loss']:.4f}",
            f"{run['validation_loss'] - baseline['validation_loss']:+.4f}",
            f"{run['tokens_per_s']:,.0f}",
            run["mlflow_run_id"] or "-",
        )
    return shown


def draw_losses(arms: Mapping[str, RunFolder], path: Path) -> Path:
    """Training loss by tokens, an arm a line; validation losses as points in the arm's colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for label, folder in arms.items():
        metrics = results.load_metrics([folder])
        (line,) = axes.plot(metrics["tokens"], metrics["loss"], label=label, linewidth=1.2)
        validation = results.load_validations([folder]).merge(metrics[["step", "tokens"]], on="step")
        axes.plot(validation["tokens"], validation["validation_loss"], "o", color=line.get_color(), markersize=4)
    axes.set(xlabel="training tokens", ylabel="loss, nats a token")
    axes.legend(title="training loss; points: validation", frameon=False, fontsize="small", title_fontsize="small")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return path.resolve()
