"""The style, options and output files of all figures: figures/NAME.png, .pdf, and the caption as .md.

A script consists of a query (`make_figure` or `load_chosen`), a transformation, and a plot (its `draw`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.units import ended
from mxstudy import results

FIGURES = Path("figures")
ONE_COLUMN, TWO_COLUMNS = 3.35, 6.9  # inches

# The palette of Okabe and Ito, made for colour-blind readers, with a wine red instead of its yellow, which is too
# faint for a line. An arm is recognised by the first of these words in its label, and has the same colour in every
# figure; all other arms take the colours of OTHERS in turn.
ARMS = {
    "bf16": "#000000",
    "fp32": "#666666",
    "mxnorm_p1": "#D55E00",
    "mxnorm_p2": "#009E73",
    "rmsnorm": "#0072B2",
}
SEEDS = ("seed=", "data_seed=")
OTHERS = ("#CC79A7", "#E69F00", "#56B4E9", "#882255")

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
    """Return the colour of each label."""
    others = cycle(OTHERS)
    return {
        label: next((color for arm, color in ARMS.items() if arm in re.findall(r"\w+", label)), None) or next(others)
        for label in dict.fromkeys(labels)
    }


def make_figure(
    name: str,
    shows: str | None,
    arguments: Sequence[str] | None,
    draw: Callable[..., Figure],
    *kinds: str,
    query: Callable[..., list[pd.DataFrame]] | None = None,
) -> None:
    """Run the whole command of a script without own options: `draw` is called with a frame of each of `kinds`.

    `name`: that of the figure's files. `shows`: the script's docstring. `query`: load_chosen, load_ended or load_last.
    """
    options = figure_parser(name, shows)
    chosen = options.parse_args(arguments)
    frames = (query or load_chosen)(options, chosen, *kinds)
    save(draw(*frames), chosen.name, caption(frames[0], shows))


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with --runs, the option of all scripts that read runs."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs_option(options, required=True)
    return options


def runs_option(options: argparse._ActionsContainer, required: bool = False) -> None:
    what = "folders of runs, of experiments, or runs/ itself; or prefixes of tables in results/"
    options.add_argument("--runs", nargs="+", type=Path, metavar="PATH", help=what, required=required)


def figure_parser(
    name: str, shows: str | None, source: Callable[[argparse.ArgumentParser], None] | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options of every figure; `name`: default of --name; `source`: adds --runs or others."""
    options = argparse.ArgumentParser(description=shows, formatter_class=argparse.RawDescriptionHelpFormatter)
    (source or partial(runs_option, required=True))(options)
    what = {
        "--only": "runs whose labels have all given KEY=VALUE words; of several values of one KEY, any",
        "--without": "runs whose labels have none of these words",
    }
    for option, chooses_runs in what.items():
        options.add_argument(option, nargs="+", default=[], metavar="WORD", help=chooses_runs)
    options.add_argument("--name", default=name, help="name of the files in figures/")
    return options


def load_chosen(options: argparse.ArgumentParser, chosen: argparse.Namespace, *kinds: str) -> list[pd.DataFrame]:
    """Return a frame of each kind, with the rows of the runs that --runs, --only and --without choose."""
    frames = [load(options, chosen.runs, kind) for kind in kinds]
    kept = [frame[frame["label"].map(lambda label: chooses(label, chosen))] for frame in frames]
    for frame, rows in zip(frames, kept, strict=True):
        if rows.empty:
            options.error(f"--only, --without: none is left of {'; '.join(dict.fromkeys(frame['label']))}")
    return kept


def load_ended(options: argparse.ArgumentParser, chosen: argparse.Namespace, kind: str) -> list[pd.DataFrame]:
    """Return the same as load_chosen for runs that have finished or diverged; the others have no result yet."""
    (runs,) = load_chosen(options, chosen, kind)
    found = ended(runs)
    if found.empty:
        options.error("--runs: none of these runs has ended")
    return [found]


def chooses(label: str, chosen: argparse.Namespace) -> bool:
    """Return whether a label has, for each key in --only, one of its words, and no word of --without."""
    words, keys = {*label.split()}, {word.partition("=")[0] for word in chosen.only}
    wanted = [{word for word in chosen.only if word.partition("=")[0] == key} for key in keys]
    return all(words & alternatives for alternatives in wanted) and not words & {*chosen.without}


def load(options: argparse.ArgumentParser, runs: list[Path], kind: str) -> pd.DataFrame:
    """Return results.load; an error about the paths ends the command with one line instead of a traceback."""
    try:
        return results.load(runs, kind)
    except ValueError as error:
        options.error(str(error))


def load_last(options: argparse.ArgumentParser, chosen: argparse.Namespace, *kinds: str) -> list[pd.DataFrame]:
    """Return the same as load_chosen for the run that was started last; report it if there are several."""
    if any(path.suffix == ".parquet" for path in chosen.runs):
        options.error("--runs: give the folder of a run, or the prefix of its tables")
    frames = load_chosen(options, chosen, *kinds)
    last = frames[0].iloc[-1]
    if (frames[0]["fingerprint"] != last["fingerprint"]).any():
        print(f"using the last of several runs: {last['label']}, {last['fingerprint'][:12]}", file=sys.stderr)
    return [frame[frame["fingerprint"] == last["fingerprint"]] for frame in frames]


def caption(rows: pd.DataFrame, shows: str | None) -> str:
    """Return a caption: the script's docstring without its command, and each arm's number of runs and fingerprints."""
    runs = rows.drop_duplicates("fingerprint")
    arms = runs.assign(arm=runs["label"].map(arm_of)).groupby("arm", sort=False)["fingerprint"]
    lines = [
        f"- {arm}: {len(names)} run{'s' * (len(names) > 1)} ({', '.join(name[:12] for name in names)})"
        for arm, names in arms
    ]
    said = (shows or "").partition("python -m")[0].strip()
    return "\n".join([said, "", *lines]) + "\n"


def arm_of(label: str, but: tuple[str, ...] = SEEDS) -> str:
    """Return a run's label without the words that begin with `but`, by default seeds: equal for repetitions."""
    words = [word for word in label.split() if not word.startswith(but)]
    return " ".join(words) or label


def arms_of(labels: Iterable[str], but: tuple[str, ...] = SEEDS) -> dict[str, str]:
    """Return the arm of each label, without the words that all arms share if there are several."""
    arms = {label: arm_of(label, but).split() for label in dict.fromkeys(labels)}
    common = set.intersection(*map(set, arms.values())) if len({*map(tuple, arms.values())}) > 1 else set()
    return {label: " ".join(word for word in arm if word not in common) or label for label, arm in arms.items()}


def heading(arm: str) -> str:
    """Return an arm's name with one word per line, numbers rounded to three digits."""
    return re.sub(r"(?<==)[-+.\de]{5,}$", lambda number: f"{float(number[0]):.3g}", arm.replace(" ", "\n"), flags=re.M)


def cross(axes: Axes, x: pd.Series, y: pd.Series, **style: Any) -> None:
    """Mark the end of a diverged curve at its last finite value."""
    alive = np.isfinite(y)
    axes.plot(x[alive].iloc[-1:], y[alive].iloc[-1:], "x", **style)


def save_table(markdown: str, name: str) -> Path:
    """Write figures/NAME.md; print and return its path."""
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / f"{name}.md"
    path.write_text(markdown)
    print(path)
    return path


def save(figure: Figure, name: str, caption: str) -> Path:
    """Write the figure as PNG and PDF and its caption as Markdown; print and return the path of the PNG."""
    FIGURES.mkdir(exist_ok=True)
    path = FIGURES / f"{name}.png"
    for suffix in (".png", ".pdf"):
        figure.savefig(path.with_suffix(suffix))
    path.with_suffix(".md").write_text(f"![{name}]({path.name})\n\n{caption}")
    plt.close(figure)
    print(path)
    return path
