"""Write one self-contained HTML page for a set of runs: arms, intervals, claims, figures, configs, machines.

python -m analysis.report --runs runs/quickstart [--to figures/report.html]
"""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import loss_curves
from analysis.command import command
from analysis.ledger.documents import judged_by_runs
from analysis.ledger.page import effect
from analysis.ledger.tables import Tables
from analysis.mxnorm import fig03_lr_sensitivity, fig06_norm_rms, fig07_histograms, figa3_spike_scores
from analysis.style import FIGURES, of_runs, parser, plt
from analysis.units import differing, ended
from mxstudy import results

NUMBERS = {  # column -> its title, and how its numbers are written
    "validation_loss": ("validation loss, nats", ",.4f"),
    "spike_score": ("spike score", ",.2f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".3f"),
    "memory_gib": ("memory, GiB", ".1f"),
}
DATA = "config.data."
# Where a corpus, or one of a blend, is read from, and a tokenizer.
NAMES = re.compile(r"config\.(data\.(corpora\.[^.]+\.)?(paths|name|revision)|tokenizer\.name)")
CONTENT = f"{DATA}unigram_entropy_nats"  # distinguishes corpora by content; their names are not compared
MOST_RUNS = 9  # in a figure with one panel or line per run
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-size: 13px; display: block; overflow-x: auto }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
h2 { margin-top: 2.2rem; border-bottom: 2px solid #1a1a1a } img { max-width: min(100%, 46rem) } code { font-size: 12px }
.reproduced { color: #00724f; font-weight: 600 } .contradicted { color: #b34700; font-weight: 600 }
"""


def page(runs: pd.DataFrame, figures: dict[str, Figure]) -> str:
    """Return the page as HTML. `runs`: from `in_arms`."""
    experiments = ", ".join(sorted(runs["config.experiment"].unique()))
    parts = {
        "What was asked": commands(runs),
        "Arms": arms(runs),
        "Differences": differences(runs),
        "What the papers claim": claims(runs),
        "Figures": Html("".join(embedded(title, figure) for title, figure in figures.items())) + left_out(runs),
        "What differs between the configs": configs(runs),
        "Runs and where they ran": environment(runs),
    }
    about = f"""{len(runs)} runs in {runs["arm"].nunique()} arms. ± is the 95 % interval of the mean over seeds
(Student's t), the number of runs in brackets."""
    body = [element("h2", title) + part for title, part in parts.items()]
    head = [Html('<meta charset="utf-8">'), element("title", experiments), element("style", Html(STYLE))]
    whole = element("html", *head, element("h1", experiments), element("p", about), *body, lang="en")
    return f"<!doctype html>{whole}"


class Html(str):
    """Text that is HTML already; only `element` makes it of other text."""

    def __add__(self, other: str) -> Html:
        return Html(str(self) + escaped(other))


def escaped(content: object) -> str:
    """Return the content as HTML: what is no `Html` is text, whatever it looks like."""
    return str(content) if isinstance(content, Html) else html.escape(str(content))


def element(tag: str, *content: object, **attributes: str) -> Html:
    """Return an element with that content and attributes; `kind` is the attribute class."""
    named = {"class" if name == "kind" else name: value for name, value in attributes.items()}
    given = "".join(f' {name}="{html.escape(value)}"' for name, value in named.items())
    return Html(f"<{tag}{given}>{''.join(map(escaped, content))}</{tag}>")


def in_arms(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with their arms; corpora are told apart by what they hold, not by what they are called."""
    names = [column for column in runs if NAMES.match(column)]
    return results.with_arms(runs.assign(**{CONTENT: content(runs)}).drop(columns=names))


def content(runs: pd.DataFrame) -> pd.Series:
    """Return each run's unigram entropy, nats; a run that never read its corpus gets that of an equal data config."""
    found = runs["unigram_entropy_nats"].round(6)
    config = runs[[column for column in runs if column.startswith(DATA)]].astype(str).agg("|".join, axis=1)
    return found.fillna(found.groupby(config).transform("first"))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    def cell(value: object) -> Html:
        return element("td", value, kind="number") if isinstance(value, Number) else element("td", value)

    head = element("tr", *(element("th", column) for column in columns))
    return element("table", head, *(element("tr", *map(cell, row)) for row in rows))


class Number(str):
    """Text that is aligned to the right."""


def commands(runs: pd.DataFrame) -> Html:
    lines = [element("p", element("code", line)) for line in runs["command"].dropna().drop_duplicates()]
    return Html("".join(lines or [element("p", "no command was recorded")]))


def arms(runs: pd.DataFrame) -> Html:
    """Return the HTML table with one row per arm; below it, the backends and the code of the arms if they differ."""
    rows = []
    for arm, own in runs.groupby("arm", sort=False):
        states = ", ".join(f"{count} {state}" for state, count in own["state"].value_counts().items())
        done = ended(own)
        numbers = [Number(results.estimate(done[column]).counted(form)) for column, (_, form) in NUMBERS.items()]
        square = element("span", "■", style=f"color: {own['color'].iloc[0]}")
        rows.append([square + f" {arm}", states, *numbers])
    said = (results.different_backends(zip(runs["arm"], backends(runs), strict=True)), results.mixed_code(runs))
    sentences = Html("".join(element("p", sentence) for sentence in said if sentence))
    return table(["arm", "runs", *(title for title, _ in NUMBERS.values())], rows) + sentences


def backends(runs: pd.DataFrame) -> list[str | None]:
    """Return the backends of each run; None for runs and tables from before that column existed."""
    return [known if isinstance(known, str) else None for known in runs.get("backend", [None] * len(runs))]


def differences(runs: pd.DataFrame) -> Html:
    """Return the HTML table of each arm's difference from the arm that it is compared with, paired by seed."""
    rows = [
        [row.arm, row.partner or "-", Number(row.difference.counted("+.4f") if row.difference else "-")]
        for row in results.arm_rows(ended(runs), "validation_loss")
        if row.arm != row.partner
    ]
    return table(["arm", "less", "validation loss, same seeds"], rows)


def claims(runs: pd.DataFrame) -> Html:
    """Return the HTML table of those claims of the ledger of which these runs say something."""
    rows = [
        [
            f"{document}, {one.claim.where}",
            one.claim.says,
            element("span", one.verdict, kind=one.verdict.replace(" ", "-")),
            effect(one),
        ]
        for document, one in judged_by_runs(Tables(instead={"runs": runs}))
    ]
    if not rows:
        return element("p", "these runs have no claim's arms")
    return table(["where", "claim", "here", "evidence"], rows)


def configs(runs: pd.DataFrame) -> Html:
    columns = differing(runs)
    rows = [
        [
            arm,
            *(", ".join(sorted({str(v) for v in own[column].dropna()})) or "-" for column in columns),
        ]
        for arm, own in runs.groupby("arm", sort=False)
    ]
    return table(["arm", *(column.removeprefix("config.") for column in columns)], rows)


def environment(runs: pd.DataFrame) -> Html:
    rows = [
        [
            run["name"],
            element("code", run["fingerprint"][:12]),
            run["state"],
            element("code", str(run["commit"])[:12]) + (" (changed)" if run["dirty"] else ""),
            run["torch"],
            run["gpu"] or "CPU",
            backend or "-",
        ]
        for run, backend in zip(runs.to_dict("records"), backends(runs), strict=True)
    ]
    return table(["run", "fingerprint", "state", "commit", "torch", "GPU", "backends"], rows)


def left_out(runs: pd.DataFrame) -> Html:
    few = f"{len(runs)} runs are too many for a line or a panel each: loss curves, RMS and histograms are drawn of up "
    return Html() if is_few(runs) else element("p", f"{few}to {MOST_RUNS}; the scripts of analysis/ take --only.")


def embedded(title: str, figure: Figure) -> Html:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    plt.close(figure)
    image = base64.b64encode(data.getvalue()).decode()
    picture = Html(f'<img alt="{html.escape(title)}" src="data:image/png;base64,{image}">')
    return element("h3", title) + picture


def histograms(rows: pd.DataFrame) -> Figure:
    last = rows.groupby("fingerprint", sort=False).tail(1)
    norms = [column.removesuffix("/input") for column in last if column.endswith("/input")]
    return fig07_histograms.draw(last, [norms[0], norms[-1]])


def is_few(rows: pd.DataFrame) -> bool:
    return rows["fingerprint"].nunique() <= MOST_RUNS


def has_rates(runs: pd.DataFrame) -> bool:
    return runs[fig03_lr_sensitivity.RATE].nunique() > 2


def always(rows: pd.DataFrame) -> bool:
    return True


# The figures of the page: title, kind of rows, condition under which they are drawn, function that draws them.
DRAWN: tuple[tuple[str, str, Callable[[pd.DataFrame], bool], Callable[[pd.DataFrame, pd.DataFrame], Figure]], ...] = (
    ("Validation loss by learning rate", "runs", has_rates, lambda rows, _: fig03_lr_sensitivity.draw(rows)),
    ("Training loss", "metrics", is_few, loss_curves.draw),
    ("Spike scores", "runs", always, lambda rows, _: figa3_spike_scores.draw(rows)),
    ("RMS of the norms' outputs", "norm_output_rms", is_few, lambda rows, _: fig06_norm_rms.draw(rows)),
    ("Norms' inputs and outputs at the last step", "activation_histograms", is_few, lambda rows, _: histograms(rows)),
)


def drawn(paths: Sequence[Path], runs: pd.DataFrame) -> dict[str, Figure]:
    """Return the figures that suit these runs, by title. `runs`: from `results.with_arms`."""
    figures = {}
    for title, kind, suits, draw in DRAWN:
        frames = [runs] if kind == "runs" else [f for path in paths if (f := rows_or_none(path, kind)) is not None]
        if frames and suits(rows := pd.concat(frames, ignore_index=True)):
            figures[title] = draw(rows if kind == "runs" else of_runs(rows, runs), runs)
    return figures


def rows_or_none(path: Path, kind: str) -> pd.DataFrame | None:
    try:
        return results.load([path], kind)
    except results.NoRows:
        return None


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--to", type=Path, help="default: figures/report.html, of rehearsals figures/rehearsals/report.html"
    )
    chosen = options.parse_args(arguments)
    runs = results.load(chosen.runs, "runs")
    others = sorted(set(runs["config.study"]) - {"pretrain"})
    if others:
        options.error(f"--runs: the report is for training runs only, but there are others ({', '.join(others)})")
    place = FIGURES / results.REHEARSALS if results.has_rehearsals(chosen.runs) else FIGURES
    to = chosen.to or place / "report.html"
    to.parent.mkdir(parents=True, exist_ok=True)
    runs = in_arms(runs)
    to.write_text(page(runs, drawn(chosen.runs, runs)), encoding="utf-8")
    print(to)


if __name__ == "__main__":
    main()
