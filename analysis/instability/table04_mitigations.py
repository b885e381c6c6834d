"""Validation losses of each mitigation minus those of bf16, by budget and tokens per parameter.

Tables 1, 4 and 5 of the instability paper show the same: the lowest validation loss in bf16, and for each pair of
formats, weights / activations, the difference from it. In brackets: the number that the paper prints for that size and
budget.

python -m analysis.instability.table04_mitigations --losses validation_losses.csv
python -m analysis.instability.table04_mitigations --runs runs/mitigations
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.command import command
from analysis.instability.scaling_runs import LOSS, read, source_options
from analysis.style import save_table, table_parser
from analysis.units import need_columns
from mxstudy import results

PRINTED = Path(__file__).parent / "printed_tables_1_4_5.csv"
BASELINE = "bfloat16_bfloat16"
TOLERANCE = {"tokens_per_parameter": 0.01, "flops": 0.02}  # relative, for matching a size here with a printed one
SHOWN = {
    "e2m3_bfloat16": "E2M3 / bf16",
    "e4m3_bfloat16": "E4M3 / bf16",
    "e5m2_bfloat16": "E5M2 / bf16",
    "e4m3_e4m3_forward_only": "E4M3, forward only",
    "e5m2_e5m2_forward_only": "E5M2, forward only",
}


def differences(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per size: flops, params, tokens_per_parameter, the baseline's loss, each arm's difference from it.

    Runs of the same arm and size are averaged. Raises ValueError if no run is in bf16.
    """
    need_columns(runs, ("weight_activation", "params", "tokens", LOSS))
    sizes = runs.pivot_table(index=["params", "tokens"], columns="weight_activation", values=LOSS)
    if BASELINE not in sizes:
        raise ValueError(f"no run is in bf16 ({BASELINE}), from which the differences of the others are taken")
    arms = [arm for arm in SHOWN if arm in sizes]
    table = sizes[arms].sub(sizes[BASELINE], axis=0).assign(**{BASELINE: sizes[BASELINE]}).reset_index()
    table = table.dropna(subset=BASELINE)
    table = table.assign(flops=6.0 * table["params"] * table["tokens"], ratio=table["tokens"] / table["params"])
    budget = table["flops"].map(lambda flops: float(f"{flops:.1e}"))
    order = table.assign(budget=budget).sort_values(["budget", "ratio"], ascending=[True, False])
    return order.drop(columns="budget").rename(columns={"ratio": "tokens_per_parameter"}).reset_index(drop=True)


def printed_beside(table: pd.DataFrame) -> pd.DataFrame:
    """Return, for each row of `table`, the numbers that the paper prints for that size, or NaN where it prints none."""
    printed = pd.read_csv(PRINTED)
    beside = pd.DataFrame(np.nan, table.index, [BASELINE, *SHOWN])
    for place, row in table.iterrows():
        same = pd.Series(True, printed.index)
        for column, relative in TOLERANCE.items():
            same &= (printed[column] / row[column] - 1).abs() < relative
        for column in printed.columns.intersection(beside.columns):
            beside.loc[place, column] = printed.loc[same, column].min()  # NaN if there is none
    return beside


def markdown(table: pd.DataFrame) -> str:
    arms = [arm for arm in SHOWN if arm in table]
    printed = printed_beside(table)
    rows = []
    for place, row in table.iterrows():
        shown = [f"{row['flops']:.2e}", f"{row['params'] / 1e6:.1f}M", f"{row['tokens_per_parameter']:.2f}"]
        shown += [cell(row[arm], printed.loc[place, arm], "" if arm == BASELINE else "+") for arm in [BASELINE, *arms]]
        rows.append(shown)
    text = results.markdown(["FLOPs", "N", "D/N", "bf16", *(SHOWN[arm] for arm in arms)], rows, left=["FLOPs"])
    errors = (table[arms] - printed[arms]).abs().stack().dropna()
    if len(errors):
        close = (errors < 0.001).sum()
        text += f"\n\nOf {len(errors)} printed differences {close} are within 0.001 of those here."
    return text + "\n"


def cell(ours: float, printed: float, sign: str) -> str:
    shown = "-" if np.isnan(ours) else f"{ours:{sign}.4f}"
    return shown if np.isnan(printed) else f"{shown} ({printed:{sign}g})"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = table_parser("instability_table04_mitigations", __doc__, source_options)
    chosen = options.parse_args(arguments)
    with options.usage_errors((ValueError, OSError)):
        runs, said = read(options, chosen, __doc__)
        table = differences(runs)
    save_table(f"{said}\n{markdown(table)}", chosen.name)


if __name__ == "__main__":
    main()
