"""Tables of a perplexity study: the total loss of one checkpoint, and paired differences between several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from mxstudy import results
from mxstudy.evaluation.paired import CONFIDENCE, SEED, Difference, draw_means
from mxstudy.results.terminal import markdown, show
from mxstudy.studies.evaluate.tables import baseline_arm, named
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary

TOTALS = ("documents", "tokens", "nats/token", "perplexity", "bits/byte", "bits/char")


def show_totals(folder: RunFolder) -> None:
    row = totals_in(folder)
    title = f"windows of {row['window']:,} tokens every {row['stride']:,}"
    notes = ["bits/byte: +- its standard error over documents"] if row["documents"] > 1 else []
    show(title, TOTALS, [cells_of(row)], notes)


def totals_in(folder: RunFolder) -> pd.Series:
    return results.load_table([folder], "perplexity").iloc[0]


def cells_of(row: pd.Series) -> tuple[str, ...]:
    counts = (f"{row[name]:,}" for name in ("documents", "tokens"))
    bits = results.plus_minus(row["bits_per_byte"], row["bits_per_byte_stderr"], ".4f")
    loss, perplexity = f"{row['nats_per_token']:.4f}", f"{row['perplexity']:,.2f}"
    return *counts, loss, perplexity, bits, f"{row['bits_per_character']:.4f}"


# ---------------------------------------------------------------------------------------------------- comparison


class Unit(NamedTuple):
    """A unit of loss: `total` is its key in the totals, `column` the documents' size in it, `nats` its size in nats.

    `any_tokenizer`: whether losses of models with different tokenizers can be compared in it.
    """

    name: str
    total: str
    column: str
    nats: float
    any_tokenizer: bool


UNITS = (
    Unit("bits/byte", "bits_per_byte", "bytes", math.log(2), True),
    Unit("nats/token", "nats_per_token", "tokens", 1.0, False),
)


def summarise(runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
    """Print and return each checkpoint's loss, and its difference to the baseline's, per byte and per token.

    The baseline is the first checkpoint with the choices in `baseline`, else the first of all. Differences are over the
    common documents; models with different tokenizers are compared per byte alone.
    """
    arms = named(runs, "perplexity")
    against = baseline_arm(arms, baseline)
    parts, lines = [], []
    for unit in UNITS:
        title = f"{unit.name}, minus {against}: 95 % paired bootstrap interval"
        columns = ("arm", unit.name, "difference", "docs")
        cells = [(label, *compared(folder, arms[against], unit)) for label, folder in arms.items()]
        show(title, columns, cells, [])
        parts.append(markdown(title, columns, cells))
        lines.append(f"{unit.name}: {', '.join(f'{label} {loss}' for label, loss, *_ in cells)}")
    return Summary("\n\n".join(parts), result=lines[0])


def compared(ours: RunFolder, theirs: RunFolder, unit: Unit) -> tuple[str, ...]:
    """Return as text our loss, its difference to theirs ('-' if not comparable), and the number of common documents."""
    row, both = totals_in(ours), paired(ours, theirs)
    comparable = unit.any_tokenizer or row["tokenizer"] == totals_in(theirs)["tokenizer"]
    delta = difference(both, unit).shown() if comparable and ours != theirs and len(both) else "-"
    return f"{row[unit.total]:.4f}", delta, f"{len(both):,}"


def paired(ours: RunFolder, theirs: RunFolder) -> pd.DataFrame:
    """Return the common documents, matched by text: nats (ours), nats_theirs, and our values of all other columns."""
    tables = [results.load_table([folder], "documents") for folder in (ours, theirs)]
    return tables[0].merge(tables[1][["sha256", "nats"]], on="sha256", suffixes=("", "_theirs"), validate="one_to_one")


def difference(both: pd.DataFrame, unit: Unit) -> Difference:
    """Return sum(ours - theirs) / sum(units), with a bootstrap interval from 10,000 draws of documents.

    A single document has no interval: every draw would be that document.
    """
    pairs = np.stack(((both["nats"] - both["nats_theirs"]) / unit.nats, both[unit.column]), axis=1)
    draws = draw_means(np.random.default_rng(SEED), pairs)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws[:, 0] / draws[:, 1], [tail, 1 - tail]) if len(both) > 1 else (np.nan, np.nan)
    return Difference(float(pairs[:, 0].sum() / pairs[:, 1].sum()), float(low), float(high), None, len(both))
