"""How every figure looks, and where it goes: figures/NAME.png, .pdf and, the caption, .md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from mxstudy import results

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
        help="folders of runs, of experiments, or runs/ itself; or tables of results/ by what their names begin with",
    )
    return options


def load(options: argparse.ArgumentParser, runs: list[Path], kind: str) -> pd.DataFrame:
    """results.load; what is wrong with the paths ends the command in a line, not in a traceback."""
    try:
        return results.load(runs, kind)
    except ValueError as error:
        options.error(str(error))


def load_tables(options: argparse.ArgumentParser, runs: list[Path], *kinds: str) -> list[pd.DataFrame]:
    """The tables of those kinds of one run: the one that was begun last if there are several, which a line says."""
    if any(path.suffix == ".parquet" for path in runs):
        options.error("--runs: give the folder of a run, or what the names of its tables begin with")
    frames = [load(options, runs, kind) for kind in kinds]
    last = frames[0].iloc[-1]
    if (frames[0]["fingerprint"] != last["fingerprint"]).any():
        print(f"of several runs the last: {last['label']}, {last['fingerprint'][:12]}", file=sys.stderr)
    return [frame[frame["fingerprint"] == last["fingerprint"]] for frame in frames]


def caption(rows: pd.DataFrame, shows: str | None) -> str:
    """What is seen (a script's docstring, less its command), and of which runs: arms, how many, fingerprints."""
    runs = rows.drop_duplicates("fingerprint")
    arms = runs.assign(arm=runs["label"].map(arm_of)).groupby("arm", sort=False)["fingerprint"]
    lines = [
        f"- {arm}: {len(names)} run{'s' * (len(names) > 1)} ({', '.join(name[:12] for name in names)})"
        for arm, names in arms
    ]
    said = (shows or "").partition("python -m")[0].strip()
    return "\n".join([said, "", *lines]) + "\n"


def arm_of(label: str) -> str:
    """A run's label without its seeds: runs that share it repeat each other."""
    words = [word for word in label.split() if not word.startswith(("seed=", "data_seed="))]
    return " ".join(words) or label


def save(figure: Figure, name: str, caption: str) -> Path:
    """Writes the figure as PNG and PDF, its caption as Markdown; prints and returns the path of the PNG."""
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / f"{name}.png"
    for suffix in (".png", ".pdf"):
        figure.savefig(path.with_suffix(suffix))
    path.with_suffix(".md").write_text(f"![{name}]({path.name})\n\n{caption}")
    plt.close(figure)
    print(path)
    return path
