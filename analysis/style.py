"""Define the style, options and output files of all figures: figures/NAME.png, .pdf, and the caption as .md.

A script consists of a query (`make_figure` or `load_chosen`), a transformation, and a plot (its `draw`).
"""

from __future__ import annotations

import argparse
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from analysis.command import Parser, without_command
from analysis.units import ended
from mxstudy import results

FOLDER = Path("figures")
ONE_COLUMN, TWO_COLUMNS = 3.25, 6.75  # inches, as in a paper; every figure is as wide as one of them
FILE_FORMATS = ("png", "pdf")

TOKENS = ["config.train.batch_size", "config.train.sequence_length"]  # their product is the tokens of a step
NORMS = tuple(results.KNOWN[name] for name in ("mxnorm_p1", "rmsnorm", "mxnorm_p2"))  # for names, if no other is left
OF_RUN = ["arm", "color", "name"]  # what the rows of every figure say about their run, beside its fingerprint

mpl.use("Agg")  # writes files, and opens no window
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


def colors(words: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name that is not an arm's: that of a norm or recipe in it, else one made from the name.

    A colour made from the name is the same in every figure, unless an earlier name has taken it.
    """
    names = {name: re.findall(r"\w+", name) for name in words}
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: results.KNOWN.keys().isdisjoint(names[name])):
        start = zlib.crc32(name.encode()) % len(results.OTHERS)
        hues = results.OTHERS[start:] + results.OTHERS[:start] + NORMS
        others = [results.shaded(hue, shade) for shade in results.SHADES for hue in hues]
        wished = [color for known, color in results.KNOWN.items() if known in names[name]]
        free = [color for color in (*wished, *others) if color not in found.values()]
        found[name] = free[0] if free else others[len(found) % len(others)]
    return {name: found[name] for name in names}


def make_figure(
    name: str,
    shows: str | None,
    arguments: Sequence[str] | None,
    draw: Callable[..., Figure],
    *kinds: str,
    query: Callable[..., list[pd.DataFrame]] | None = None,
) -> None:
    """Run the whole command of a script without own options: `draw` is called with a frame of each of `kinds`.

    If `draw` raises ValueError, because it cannot draw these runs, the script ends with a usage error.
    `name` is that of the figure's files, `shows` the script's docstring, `query` load_chosen, load_ended or load_last.
    """
    options = figure_parser(name, shows)
    chosen = options.parse_args(arguments)
    frames = (query or load_chosen)(options, chosen, *kinds)
    with options.usage_errors():
        figure = draw(*frames)
    save(figure, chosen, caption(frames[0], shows, chosen.runs))


class FigureParser(Parser):
    """The options of a figure. Figures of rehearsals go to a folder of their own."""

    def parse_args(self, *arguments: Any, **others: Any) -> Any:
        chosen = super().parse_args(*arguments, **others)
        if results.has_rehearsals(getattr(chosen, "runs", None) or ()):
            chosen.name = f"{results.REHEARSALS}/{chosen.name}"
        return chosen


def runs_option(options: argparse._ActionsContainer, required: bool = False) -> None:
    what = "folders of runs, of experiments, or runs/ itself; or prefixes of tables in results/"
    options.add_argument("--runs", nargs="+", type=Path, metavar="PATH", help=what, required=required)


def figure_parser(
    name: str, shows: str | None, source: Callable[[argparse.ArgumentParser], None] | None = None
) -> Parser:
    """Return a parser with the options of every figure.

    `name` is the default of --name. `source` adds --runs or its alternatives.
    """
    options = table_parser(name, shows, source)
    what = "files to write; both are as wide as one or two columns of a paper, 3.25 or 6.75 inches"
    options.add_argument("--format", nargs="+", choices=FILE_FORMATS, default=FILE_FORMATS, help=what)
    return options


def table_parser(
    name: str, shows: str | None, source: Callable[[argparse.ArgumentParser], None] | None = None
) -> Parser:
    """Return a parser with the options of every table, which are those of a figure without --format."""
    options = FigureParser(shows)
    (source or partial(runs_option, required=True))(options)
    what = {
        "--only": "runs with these choices of groups or values of config keys; of several values of one KEY, any",
        "--without": "runs with none of these choices and values",
    }
    for option, chooses_runs in what.items():
        options.add_argument(option, nargs="+", default=[], metavar="KEY=VALUE", help=chooses_runs)
    options.add_argument("--name", type=inner_path, default=name, help="name of the files in figures/")
    return options


def inner_path(word: str) -> str:
    """Return a path below a folder, such as published/loss. Raises argparse's error if it leads out of the folder."""
    if Path(word).is_absolute() or ".." in Path(word).parts:
        raise argparse.ArgumentTypeError(f"{word} leads out of figures/; give a name, such as loss or mine/loss")
    return word


def choice_of_group(word: str) -> str:
    """Return an option's word GROUP=CHOICE. Raises argparse's error for another form."""
    if not re.fullmatch(r"[^=]+=.+", word):
        raise argparse.ArgumentTypeError(f"{word} is not of the form GROUP=CHOICE, such as norm=rmsnorm")
    return word


def baseline_option(options: argparse.ArgumentParser) -> None:
    what = "compare with these runs, in place of the sweep's own baseline, such as norm=rmsnorm"
    options.add_argument("--baseline", type=choice_of_group, metavar="GROUP=CHOICE", help=what)


def check_baseline(options: argparse.ArgumentParser, chosen: argparse.Namespace, runs: pd.DataFrame) -> None:
    """Stop with an error if no run has the choice that --baseline names. `runs` are from `load_chosen`."""
    group, _, choice = (chosen.baseline or "").partition("=")
    if group and not (runs.get(f"choice.{group}") == choice).any():
        options.error(f"--baseline: no run has {chosen.baseline}; there are {'; '.join(dict.fromkeys(runs['arm']))}")


def load_chosen(
    options: Parser,
    chosen: argparse.Namespace,
    *kinds: str,
    read: Callable[[Sequence[Path], str], pd.DataFrame] | None = None,
) -> list[pd.DataFrame]:
    """Return a frame of each kind, with the rows of the runs that --runs, --only and --without choose.

    The rows of runs that are not replicas have the columns OF_RUN, named among the chosen runs; rows of "runs" have all
    columns of `results.with_arms`. `read` returns the rows of one kind, by default `results.load`.
    """
    baseline = getattr(chosen, "baseline", None)
    frames = {kind: (read or results.load)(chosen.runs, kind) for kind in kinds}
    runs = frames["runs"] if "runs" in kinds else load_or_none(chosen.runs, "runs")
    if runs is None or "config.study" not in runs:  # a benchmark's rows, or a file of one kind
        if "runs" in kinds:
            options.error("--runs: has rows but no configs; give the folder of runs, or the prefix of their tables")
        return list(frames.values())
    with options.usage_errors():
        kept = runs[chooses(runs, chosen)]
    if kept.empty:
        options.error(f"--only, --without: none of the {len(runs)} runs is left")
    kept = results.with_arms(kept, dict([baseline.split("=", 1)]) if baseline else None)
    shared = results.shared_fingerprint(kept)
    if shared and {*kinds} != {"runs"}:
        options.error(f"--runs: runs of several commits have the fingerprint {shared[:12]}; give one of them at a time")
    is_whole = len(kept) == len(runs)
    return [kept if kind == "runs" else of_runs(frame, kept, is_whole) for kind, frame in frames.items()]


def load_or_none(paths: Sequence[Path], kind: str) -> pd.DataFrame | None:
    """Return the rows of a kind, or None if these runs or tables have none."""
    try:
        return results.load(paths, kind)
    except results.NoRows:
        return None


def of_runs(rows: pd.DataFrame, runs: pd.DataFrame, whole: bool = False) -> pd.DataFrame:
    """Return the rows of these runs. `whole` says that all rows are of them.

    Rows of runs that are not replicas get the columns OF_RUN. Rows of language models' steps get the column tokens: how
    many the run has trained on after the step.
    """
    keys = [key for key in ("fingerprint", "replica") if key in rows and key in runs]
    if "replica" in keys:  # they have millions of rows, and their figures name arms by the keys given to them
        return rows if whole else rows.merge(runs[keys].drop_duplicates(), on=keys)
    own = rows.merge(runs.drop_duplicates(keys)[[*keys, *OF_RUN]], on=keys)
    if "step" not in own or not {*TOKENS} <= {*runs}:
        return own
    a_step = runs.drop_duplicates("fingerprint").set_index("fingerprint")[TOKENS].prod(axis=1)
    return own.assign(tokens=(own["step"] + 1) * own["fingerprint"].map(a_step))


def load_ended(options: Parser, chosen: argparse.Namespace, kind: str) -> list[pd.DataFrame]:
    """Return the same as load_chosen for runs that have finished or diverged. The others have no result yet."""
    (runs,) = load_chosen(options, chosen, kind)
    found = ended(runs)
    if found.empty:
        options.error("--runs: none of these runs has ended")
    return [found]


def chooses(runs: pd.DataFrame, chosen: argparse.Namespace) -> pd.Series:
    """Return whether each run has, for each key in --only, one of its values, and no value of --without."""
    wanted: dict[str, list[str]] = {}
    for word in chosen.only:
        wanted.setdefault(word.partition("=")[0], []).append(word)
    found = pd.Series(True, runs.index)
    for words in wanted.values():
        found &= pd.concat([has(runs, word) for word in words], axis=1).any(axis=1)
    for word in chosen.without:
        found &= ~has(runs, word)
    return found


def has(runs: pd.DataFrame, word: str) -> pd.Series:
    """Return whether each run has the choice or value of a word KEY=VALUE. Raises ValueError for an unknown key."""
    key, _, value = word.partition("=")
    names = [name for name in (f"choice.{key}", f"config.{key}", key) if name in runs]
    if not names:
        raise ValueError(f"--only, --without: {key} is neither a group nor a key of these runs")
    values = runs[names[0]]
    if value.lower() in ("true", "false"):
        return values.map(lambda one: str(one).lower() == value.lower())
    if pd.api.types.is_numeric_dtype(values):
        return values == pd.to_numeric(value, errors="coerce")
    return values.map(str) == value


def load_last(options: Parser, chosen: argparse.Namespace, *kinds: str) -> list[pd.DataFrame]:
    """Return the same as load_chosen for the run that was started last, and print which one if there are several."""
    if any(path.suffix == ".parquet" for path in chosen.runs):
        options.error("--runs: give the folder of a run, or the prefix of its tables")
    frames = load_chosen(options, chosen, *kinds)
    last = frames[0].iloc[-1]
    if (frames[0]["fingerprint"] != last["fingerprint"]).any():
        print(f"using the last of several runs: {last['name']}, {last['fingerprint'][:12]}", file=sys.stderr)
    return [frame[frame["fingerprint"] == last["fingerprint"]] for frame in frames]


def caption(rows: pd.DataFrame, shows: str | None, paths: Sequence[Path] = ()) -> str:
    """Return a caption: the script's docstring without its command, and each arm's number of runs and fingerprints.

    A sentence names the code of the runs if it differs, or if it cannot be known. `paths` are where the rows come from,
    needed if they are not rows of runs.
    """
    by = "arm" if "color" in rows else "label"  # a benchmark's rows are of a device
    runs = rows.drop_duplicates([key for key in ("fingerprint", "commit") if key in rows])
    arms = runs.groupby(by, sort=False)["fingerprint"]
    lines = [
        f"- {arm}: {len(names)} run{'s' * (len(names) > 1)} ({', '.join(name[:12] for name in names)})"
        for arm, names in arms
    ]
    known = rows if "code" in rows else results.load_code(paths)
    code = results.mixed_code(known[known["fingerprint"].isin(runs["fingerprint"])])
    return "\n".join([without_command(shows), "", *lines, *(["", code] if code else [])]) + "\n"


def heading(arm: str) -> str:
    """Return an arm's name with one word per line, numbers rounded to three digits."""
    return re.sub(r"(?<==)[-+.\de]{5,}$", lambda number: f"{float(number[0]):.3g}", arm.replace(" ", "\n"), flags=re.M)


def rows_of_panels(
    count: int, abreast: int, height: float, above: float = 0.0, width: float = TWO_COLUMNS, **shared: Any
) -> tuple[Figure, np.ndarray]:
    """Return a figure and its panels in rows of this height, `abreast` in each. Those after `count` are hidden."""
    lines = -(-count // abreast)
    figure, panels = plt.subplots(lines, abreast, figsize=(width, above + height * lines), squeeze=False, **shared)
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    return figure, panels


def cross(axes: Axes, x: pd.Series, y: pd.Series, **style: Any) -> None:
    """Mark the end of a diverged curve at its last finite value."""
    alive = np.isfinite(y)
    axes.plot(x[alive].iloc[-1:], y[alive].iloc[-1:], "x", label="diverged", **style)


def save_table(markdown: str, name: str) -> None:
    """Write figures/NAME.md and print its path."""
    path = FOLDER / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown)
    print(path)


def save(figure: Figure, chosen: argparse.Namespace, caption: str) -> None:
    """Write the figure as --name and --format say, and its caption as Markdown. Print the first path."""
    paths = [FOLDER / f"{chosen.name}.{suffix}" for suffix in chosen.format]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        results.save_figure(figure, path)
    (FOLDER / f"{chosen.name}.md").write_text(f"![{chosen.name}]({paths[0].name})\n\n{caption}")
    plt.close(figure)
    print(paths[0])


def with_palette(path: Path) -> Image.Image:
    """Return an image in 256 colours, with which it takes a third of the space."""
    with Image.open(path) as image:
        return image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
