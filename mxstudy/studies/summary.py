"""What a sweep of pre-training runs says at its end: one table, one figure of its loss curves."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table

from mxstudy import results
from mxstudy.tracking.folder import RunFolder

FIGURES = Path("figures")
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
HALF_LIFE = 0.02  # of the exponential mean, as a share of the steps


def summarize(arms: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> None:
    """Print the table of the arms, by label, and the path of their figure.

    `baseline`: the choices by config group of the arm that the others are compared with; {}: the first.
    """
    arms = {short(label): folder for label, folder in arms.items()}
    runs = results.load_runs(list(arms.values())).assign(label=list(arms))
    against = baseline_arm(runs, baseline)
    Console(highlight=False).print(table(runs, against))
    for entropy_nats in runs["unigram_entropy_nats"].dropna().unique():
        print(f"unigram entropy of the validation split: {entropy_nats:.4f} nats a token")
    experiment = next(iter(arms.values())).config().experiment
    print(f"loss curves: {draw_losses(arms, against, FIGURES / f'{experiment}.png')}", flush=True)


def short(label: str) -> str:
    """'precision=mxfp8 norm=rmsnorm' as 'mxfp8 rmsnorm': these choices say what they are."""
    return label.replace("norm=", "").replace("precision=", "")


def baseline_arm(runs: pd.DataFrame, baseline: Mapping[str, str]) -> pd.Series:
    """The first run with those choices; the first of all, and a line that says so, where no run has them."""
    wanted = {f"choice.{group}": choice for group, choice in baseline.items()}
    fits = runs.reindex(columns=list(wanted)).eq(pd.Series(wanted, dtype=object)).all(axis="columns")
    if not fits.any():
        print(f"baseline: no arm has {dict(baseline)}; {runs['label'].iloc[0]} stands in for it")
        return runs.iloc[0]
    return runs[fits].iloc[0]


def table(runs: pd.DataFrame, baseline: pd.Series) -> Table:
    caption = f"diff: validation loss less that of {baseline['label']}; losses in nats a token"
    shown = Table("arm", box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    shown.padding = (0, 1, 0, 0)  # so that four arms and their run ids fit into 80 columns
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


def draw_losses(arms: Mapping[str, RunFolder], baseline: pd.Series, path: Path) -> Path:
    """Loss by training tokens, an arm a colour, and below it the difference to the baseline's at the same tokens.

    Lines: exponential mean of the training loss, the raw loss faint behind it. Points: validation loss.
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
            axes.plot(smoothed(loss), color=color, linewidth=1.4, label=label)
            axes.plot(validation[arm].dropna(), "o", color=color, markersize=4)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss, nats a token")
    panels[0].legend(title="line: training; point: validation", frameon=False)
    panels[1].set(xlabel="training tokens", ylabel=f"less that of\n{baseline['label']}")
    panels[1].xaxis.set_major_formatter(EngFormatter())
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.resolve()


def load_losses(folders: list[RunFolder], name: str) -> pd.DataFrame:
    """A row a number of training tokens, a column a fingerprint; NaN where a run has no such loss."""
    rows, validations = results.load_metrics(folders), results.load_validations(folders)
    if len(validations):  # none where every run has diverged
        rows = rows.merge(validations, how="left", on=["fingerprint", "step"])
    rows = rows.reindex(columns=["tokens", "fingerprint", name])
    return rows.pivot(index="tokens", columns="fingerprint", values=name)


def smoothed(loss: pd.Series) -> pd.Series:
    return loss.ewm(halflife=max(1.0, HALF_LIFE * len(loss))).mean()
