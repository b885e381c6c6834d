"""How every figure looks, and where it goes: figures/NAME.png and figures/NAME.pdf."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from mxstudy import results

Loader = Callable[[Sequence[results.RunFolder]], pd.DataFrame]

FIGURES = Path("figures")
ONE_COLUMN, TWO_COLUMNS = 3.35, 6.9  # inches

# The palette of Okabe and Ito, made for colour-blind readers. An arm is known by the first of these texts that its
# label contains, and has the same colour in every figure; arms that are not known share out the rest.
ARMS = {
    "bf16": "#000000",
    "fp32": "#666666",
    "mxnorm_p1": "#D55E00",
    "mxnorm_p2": "#009E73",
    "rmsnorm": "#0072B2",
}
OTHERS = ("#CC79A7", "#E69F00", "#56B4E9", "#F0E442")

mpl.use("Agg")  # files, no windows
plt.rcParams.update(
    {
        "figure.constrained_layout.use": True,
        "figure.dpi": 110,
        "savefig.dpi": 220,
        "font.size": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.5,
        "lines.linewidth": 1.2,
        "legend.frameon": False,
        "pdf.fonttype": 42,  # text stays text
    }
)


def colors(labels: Iterable[str]) -> dict[str, str]:
    """The colour of each label."""
    others = cycle(OTHERS)
    return {
        label: next((color for arm, color in ARMS.items() if arm in label), None) or next(others)
        for label in dict.fromkeys(labels)
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """The option that every figure has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        required=True,
        metavar="PATH",
        help="folders of runs, of experiments, or runs/ itself; or .parquet tables of the same rows",
    )
    return options


def load(options: argparse.ArgumentParser, runs: list[Path], loader: Loader) -> pd.DataFrame:
    """results.load; what is wrong with the paths ends the command in a line, not in a traceback."""
    try:
        return results.load(runs, loader)
    except ValueError as error:
        options.error(str(error))


def load_tables(options: argparse.ArgumentParser, runs: list[Path], *names: str) -> list[pd.DataFrame]:
    """The tables of those names of one run: the one that was begun last if there are several, which a line says."""
    if any(path.suffix == ".parquet" for path in runs):
        options.error("--runs: give the folder of a run; this is drawn from the tables in it")
    frames = [load(options, runs, partial(results.load_table, name=name)) for name in names]
    last = frames[0].iloc[-1]
    if (frames[0]["fingerprint"] != last["fingerprint"]).any():
        print(f"of several runs the last: {last['label']}, {last['fingerprint'][:12]}", file=sys.stderr)
    return [frame[frame["fingerprint"] == last["fingerprint"]] for frame in frames]


def save(figure: Figure, name: str) -> Path:
    """Writes the figure as PNG and PDF; prints and returns the path of the PNG."""
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / f"{name}.png"
    for suffix in (".png", ".pdf"):
        figure.savefig(path.with_suffix(suffix))
    plt.close(figure)
    print(path)
    return path
