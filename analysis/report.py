"""Write one self-contained HTML page for a set of runs: arms, intervals, claims, figures, configs, machines.

python -m analysis.report --runs runs/quickstart [--only norm=rmsnorm norm=mxnorm_p2] [--baseline norm=rmsnorm]
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis import difference_plot, loss_curves
from analysis.command import command
from analysis.ledger.claim import IMPOSSIBLE, NOT_RUN, Judged
from analysis.ledger.documents import judged_by_runs
from analysis.ledger.page import effect, here
from analysis.ledger.tables import Tables
from analysis.markup import Html, Number, element, folded, table
from analysis.mxnorm import fig03_lr_sensitivity, fig06_norm_rms, fig07_histograms, figa3_spike_scores
from analysis.style import (
    FOLDER,
    baseline_option,
    check_baseline,
    load_chosen,
    load_or_none,
    of_runs,
    plt,
    table_parser,
)
from analysis.units import differing, ended
from mxstudy import results

NUMBERS = {  # {column: its title, and how its numbers are written}
    "validation_loss": ("validation loss, nats", ",.4f"),
    "spike_score": ("spike score", ",.2f"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".3f"),
    "memory_gib": ("memory, GiB", ".1f"),
}
DATA = "config.data."
# Where a corpus, or one of a blend, and a tokenizer are read from.
NAMES = re.compile(r"config\.(data\.(corpora\.[^.]+\.)?(paths|name|revision)|tokenizer\.name)")
CONTENT = f"{DATA}unigram_entropy_nats"  # distinguishes corpora by content, so their names are not compared
MOST = 9  # runs in a figure with a panel each, or arms in one with a line each
ENLARGED = 1.5  # figures, which are made for the columns of a paper
OPEN = 3  # commands that are shown without being opened
CLAIMS = ("where", "claim", "scale there", "scale here", "verdict here", "evidence")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-size: 13px; display: block; overflow-x: auto }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
summary { cursor: pointer } .group { padding-top: 0.8rem; font-weight: 600 }
h2 { margin-top: 2.2rem; border-bottom: 2px solid #1a1a1a } img { max-width: min(100%, 46rem) } code { font-size: 12px }
@media (max-width: 40rem) { td { min-width: 6.5rem } }
.reproduced { color: #00724f; font-weight: 600 } .contradicted { color: #b34700; font-weight: 600 }
"""


def page(runs: pd.DataFrame, figures: Mapping[str, Figure | None]) -> str:
    """Return the page as HTML. `runs` are from `in_arms`, and the figures from `drawn`."""
    shown = [embedded(title, figure) for title, figure in figures.items() if figure]
    crowded = [title for title, figure in figures.items() if figure is None]
    experiments = ", ".join(sorted(runs["config.experiment"].unique()))
    parts = {
        "What was asked": commands(runs),
        "Arms": arms(runs),
        "Differences": differences(runs),
        "What the papers claim": claims(runs),
        "Figures": Html("".join(shown)) + left_out(crowded),
        "What differs between the configs": configs(runs),
        "Runs and where they ran": environment(runs),
    }
    about = f"""{len(runs)} runs in {runs["arm"].nunique()} arms. ± is the 95 % interval of the mean over seeds
(Student's t), the number of runs in brackets."""
    body = [element("h2", title) + part for title, part in parts.items()]
    phone = Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">')
    head = element("head", phone, element("title", experiments), element("style", Html(STYLE)))
    top = [element("h1", experiments), element("p", day_and_commits(runs)), element("p", about)]
    return f"<!doctype html>{element('html', head, element('body', *top, *body), lang='en')}"


def day_and_commits(runs: pd.DataFrame) -> Html:
    """Return the day of the report and the commits of its runs."""
    known = runs[["commit", "dirty"]].drop_duplicates().dropna(subset="commit").to_dict("records")
    code = [commit(run) for run in known] or [Html("unknown")]
    return Html(f"Written on {date.today():%d %B %Y}; commit of the runs: {', '.join(code)}")


def commit(run: Mapping[str, Any]) -> Html:
    return element("code", str(run["commit"])[:12]) + (" (changed)" if run["dirty"] else "")


def in_arms(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with their arms. Corpora are told apart by their content, not by their names."""
    names = [column for column in runs if NAMES.match(column)]
    return results.with_arms(runs.assign(**{CONTENT: content(runs)}).drop(columns=names))


def content(runs: pd.DataFrame) -> pd.Series:
    """Return each run's unigram entropy in nats. A run that never read its corpus gets that of an equal data config."""
    found = runs["unigram_entropy_nats"].round(6)
    config = runs[[column for column in runs if column.startswith(DATA)]].map(str).agg("|".join, axis=1)
    return found.fillna(found.groupby(config).transform("first"))


def commands(runs: pd.DataFrame) -> Html:
    lines = [element("p", element("code", line)) for line in runs["command"].dropna().drop_duplicates()]
    shown = Html("".join(lines or [element("p", "no command was recorded")]))
    return shown if len(lines) <= OPEN else folded(f"{len(lines)} commands", shown)


def arms(runs: pd.DataFrame) -> Html:
    """Return the HTML table with one row per arm, and below it the arms' backends and code if they differ."""
    rows = []
    for arm, own in runs.groupby("arm", sort=False):
        states = ", ".join(f"{count} {state}" for state, count in own["state"].value_counts().items())
        done = ended(own)
        numbers = [Number(results.estimate(done[column]).counted(form)) for column, (_, form) in NUMBERS.items()]
        square = element("span", "■", style=f"color: {own['color'].iloc[0]}")
        rows.append([square + f"\N{NO-BREAK SPACE}{arm}", states, *numbers])
    said = (results.different_backends(zip(runs["arm"], backends(runs), strict=True)), results.mixed_code(runs))
    sentences = Html("".join(element("p", sentence) for sentence in said if sentence))
    return table(["arm", "runs", *(title for title, _ in NUMBERS.values())], rows) + sentences


def backends(runs: pd.DataFrame) -> list[str | None]:
    """Return the backends of each run, or None for runs and tables that are older than that column."""
    return [known if isinstance(known, str) else None for known in runs.get("backend", [None] * len(runs))]


def differences(runs: pd.DataFrame) -> Html:
    """Return the HTML table of each arm's difference from the arm that it is compared with, paired by seed."""
    rows = [
        [row.arm, row.partner or "-", Number(row.difference.counted("+.4f") if row.difference else "-")]
        for row in results.arm_rows(ended(runs), "validation_loss")
        if row.arm != row.partner
    ]
    return table(["arm", "minus", "validation loss, same seeds"], rows)


def claims(runs: pd.DataFrame) -> Html:
    """Return the HTML table of the ledger's claims that these runs decide, with the other claims folded."""
    found = judged_by_runs(Tables(instead={"runs": runs}))
    told = [(where, one) for where, one in found if one.verdict not in (NOT_RUN, IMPOSSIBLE)]
    others = [row(where, one, effect(one)) for where, one in found if one.verdict in (NOT_RUN, IMPOSSIBLE)]
    shown = table(CLAIMS, [row(where, one, effect(one)) for where, one in told])
    nothing = element("p", "these runs have no claim's arms")
    return (shown if told else nothing) + folded(f"{len(others)} claims need other runs", table(CLAIMS, others))


def row(document: str, one: Judged, evidence: str) -> list[object]:
    verdict = element("span", one.verdict, kind=one.verdict.replace(" ", "-"))
    return [f"{document}, {one.claim.where}", one.claim.says, one.claim.there, here(one), verdict, evidence]


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
    """Return the HTML table of the runs, grouped by arm."""
    rows: dict[str, list[list[object]]] = {arm: [] for arm in runs["arm"].unique()}
    for run, backend in zip(runs.to_dict("records"), backends(runs), strict=True):
        found = [run["name"], element("code", run["fingerprint"][:12]), run["state"], commit(run), run["torch"]]
        rows[run["arm"]].append([*found, run["gpu"] or "CPU", backend or "-"])
    return table(["run", "fingerprint", "state", "commit", "torch", "GPU", "backends"], rows)


def left_out(titles: Sequence[str]) -> Html:
    """Return a paragraph on the figures that these runs are too many for, if there are any."""
    said = f"Not drawn of more than {MOST} runs or arms: {', '.join(titles)}; choose some of them by --only."
    return element("p", said) if titles else Html()


def embedded(title: str, figure: Figure) -> Html:
    data = io.BytesIO()
    results.save_figure(figure, data, format="png")
    plt.close(figure)
    image = base64.b64encode(data.getvalue()).decode()
    width = f"width: {ENLARGED * figure.get_figwidth():.1f}in"
    return element("h3", title) + element("img", alt=title, style=width, src=f"data:image/png;base64,{image}")


def histograms(rows: pd.DataFrame) -> Figure:
    last = rows.groupby("fingerprint", sort=False).tail(1)
    norms = [column.removesuffix("/input") for column in last if column.endswith("/input")]
    return fig07_histograms.draw(last, [norms[0], norms[-1]])


def has_few_runs(rows: pd.DataFrame) -> bool:
    return rows["fingerprint"].nunique() <= MOST


def has_few_arms(rows: pd.DataFrame) -> bool:
    return rows["arm"].nunique() <= MOST


def has_rates(runs: pd.DataFrame) -> bool:
    return runs[fig03_lr_sensitivity.RATE].nunique() > 2


def has_ended(runs: pd.DataFrame) -> bool:
    return len(ended(runs)) > 0


# The figures of the page: title, kind of rows, condition under which they are drawn, function that draws them.
DRAWN: tuple[tuple[str, str, Callable[[pd.DataFrame], bool], Callable[[pd.DataFrame, pd.DataFrame], Figure]], ...] = (
    ("Differences of the validation loss", "runs", difference_plot.suits, lambda rows, _: difference_plot.draw(rows)),
    ("Validation loss by learning rate", "runs", has_rates, lambda rows, _: fig03_lr_sensitivity.draw(rows)),
    ("Training loss", "metrics", has_few_arms, loss_curves.draw),
    ("Spike scores", "runs", has_ended, lambda rows, _: figa3_spike_scores.draw(ended(rows))),
    ("RMS of the norms' outputs", "norm_output_rms", has_few_runs, lambda rows, _: fig06_norm_rms.draw(rows)),
    ("Norms at the last step", "activation_histograms", has_few_runs, lambda rows, _: histograms(rows)),
)


def drawn(paths: Sequence[Path], runs: pd.DataFrame) -> dict[str, Figure | None]:
    """Return the figures that suit these runs, by title, and None for those that they are too many for.

    `runs` are from `results.with_arms`. Raises ValueError if two runs of an arm have equal seeds.
    """
    figures: dict[str, Figure | None] = {}
    for title, kind, suits, draw in DRAWN:
        frames = [f for path in paths if (f := load_or_none([path], kind)) is not None] if kind != "runs" else []
        rows = of_runs(pd.concat(frames, ignore_index=True), runs) if frames else runs if kind == "runs" else runs[:0]
        if len(rows) and suits(rows):
            figures[title] = draw(rows, runs)
        elif len(rows) and suits in (has_few_runs, has_few_arms):
            figures[title] = None
    return figures


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = table_parser("report", __doc__)
    baseline_option(options)
    options.add_argument("--to", type=Path, metavar="FILE", help="in place of figures/NAME.html")
    chosen = options.parse_args(arguments)
    (runs,) = load_chosen(options, chosen, "runs")
    check_baseline(options, chosen, runs)
    others = sorted(set(runs["config.study"]) - {"pretrain"})
    if others:
        kinds = " ".join(f"study={kind}" for kind in others)
        options.error(f"--runs: the report is for training runs only; --without {kinds} leaves out the others")
    runs = in_arms(runs)
    with options.usage_errors():
        text = page(runs, drawn(chosen.runs, runs))
    to = chosen.to or FOLDER / f"{chosen.name}.html"
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text, encoding="utf-8")
    print(to)


if __name__ == "__main__":
    main()
