"""The models of a set of runs, with their counted parameters, compared with what a paper prints.

MXNorm paper, table 3; instability paper, table 3; MXFP8 recipe, table 2. In brackets: the printed number if it differs.
Parameters: all of them, including embedding and head, whose size depends on the vocabulary.

python -m analysis.models_table --runs runs/convergence --paper mxnorm
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.command import command
from analysis.ledger.arithmetic import SIZES
from analysis.style import caption, load_chosen, save_table, table_parser
from analysis.units import RATE, need_columns
from mxstudy import results

MODEL, TRAIN = "config.model.", "config.train."
QUANTITIES = {  # {name: function of a row of a runs table}
    "layers": lambda run: run[f"{MODEL}num_layers"],
    "hidden size": lambda run: run[f"{MODEL}hidden_size"],
    "heads": lambda run: run[f"{MODEL}num_heads"],
    "head size": lambda run: run[f"{MODEL}hidden_size"] // run[f"{MODEL}num_heads"],
    "Q:KV heads": lambda run: run[f"{MODEL}num_heads"] // run[f"{MODEL}num_kv_heads"],
    "FFN size": lambda run: run[f"{MODEL}ffn_size"],
    "sequence length": lambda run: run[f"{TRAIN}sequence_length"],
    "batch size": lambda run: run[f"{TRAIN}batch_size"],
    "learning rate": lambda run: run[RATE],
    "tokens, millions": lambda run: (
        run[f"{TRAIN}steps"] * run[f"{TRAIN}batch_size"] * run[f"{TRAIN}sequence_length"] / 1e6
    ),
}
NEEDED = (
    *("parameters", RATE),
    *(f"{MODEL}{field}" for field in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size")),
    *(f"{TRAIN}{field}" for field in ("sequence_length", "batch_size", "steps")),
)
VARIED = ("learning rate", "batch size", "tokens, millions")  # may differ between runs of one model

# {paper: {(layers, width) of a model: what the paper prints for it}}
PRINTED: dict[str, dict[tuple[int, int], dict[str, float]]] = {
    "mxnorm": {
        (blocks, width): {
            "batch size": batch, "sequence length": length, "tokens, millions": 1000 * billions, "Q:KV heads": 4,
            "FFN size": ffn
        }
        for batch, length, billions, blocks, width, ffn, _ in SIZES.values()
    },
    "instability": {
        (n, 64 * n): {
            "heads": n, "head size": 64, "FFN size": 4 * 64 * n, "Q:KV heads": 1, "sequence length": 512
        }
        for n in range(4, 33)
    },
    "mxfp8": {
        (24, 1024): {"heads": 16, "sequence length": 4096, "batch size": 256, "learning rate": 2.5e-4},
        (24, 2048): {"heads": 16, "sequence length": 4096, "batch size": 256, "learning rate": 2e-4},
        (32, 4096): {"heads": 32, "sequence length": 4096, "batch size": 1024, "learning rate": 3e-4},
    },
}  # fmt: skip


def markdown(runs: pd.DataFrame, paper: str) -> str:
    """Return a Markdown table, one row per model. Quantities that vary between its runs show minimum and maximum."""
    table = pd.DataFrame({name: [make(run) for run in runs.to_dict("records")] for name, make in QUANTITIES.items()})
    table.insert(0, "parameters", runs["parameters"].to_list())
    rows = []
    for _, own in table.groupby([name for name in table if name not in VARIED], dropna=False):
        printed = PRINTED[paper].get((own["layers"].iloc[0], own["hidden size"].iloc[0]), {})
        rows.append([cell(own[name], printed.get(name)) for name in own])
    return results.markdown(table, rows) + "\n"


def cell(values: pd.Series, printed: float | None) -> str:
    """Return the values' range, with the printed number in brackets if no value is near it.

    A value within 0.2 % (rounding) is near.
    """
    ends = dict.fromkeys(map(short, (values.min(), values.max())))
    shown = " to ".join(ends)
    return shown if printed is None or np.isclose(values, printed, rtol=2e-3).any() else f"{shown} ({short(printed)})"


def short(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3g}" if value < 1 else f"{value:,.0f}"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = table_parser("models_table", __doc__)
    options.add_argument("--paper", choices=PRINTED, required=True, help="the paper whose printed numbers are compared")
    chosen = options.parse_args(arguments)
    (runs,) = load_chosen(options, chosen, "runs")
    with options.usage_errors():
        need_columns(runs, NEEDED)
    save_table(f"{caption(runs, __doc__)}\n{markdown(runs, chosen.paper)}", chosen.name)


if __name__ == "__main__":
    main()
