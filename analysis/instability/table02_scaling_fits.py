"""Scaling laws by format: loss against compute, and the constants (instability paper, table 2 and figures 13 to 15).

Points: the lowest validation loss of each run, coloured by N. Line: the lowest loss of the fitted law for C = 6 N D.
Intervals: 95 % of the fits to resampled runs.

python -m analysis.instability.table02_scaling_fits --losses validation_losses.csv
python -m analysis.instability.table02_scaling_fits --runs runs/lr_sensitivity
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from analysis.command import command
from analysis.instability.chinchilla import Chinchilla, bootstrap, fit
from analysis.instability.scaling_runs import LOSS, read, source_options
from analysis.style import ONE_COLUMN, TWO_COLUMNS, figure_parser, rows_of_panels, save
from analysis.units import need_columns
from mxstudy import results

NAME = "instability_table02_scaling_fits"
FORMATS = {"A": ".2e", "B": ".2e", "E": ".2f", "alpha": ".2f", "beta": ".2f", "a": ".2f"}  # as the paper prints them

COLUMNS = "weights / activations", "runs", "constant", "our fit", "95 % interval", "paper", "every printed digit agrees"
NUMBERS = {"runs", "our fit", "paper"}

# The rows of table 2: weights, activations, printed constants. The last two quantise only the forward.
PRINTED = {
    "e2m3_bfloat16": ("MXFP6 E2M3", "bfloat16", "1.84e+03 8.77e+03 0.52 0.50 0.51 0.51"),
    "e4m3_bfloat16": ("MXFP8 E4M3", "bfloat16", "2.82e+03 2.04e+04 0.54 0.52 0.55 0.51"),
    "e5m2_bfloat16": ("MXFP8 E5M2", "bfloat16", "1.68e+03 1.84e+04 0.52 0.49 0.55 0.53"),
    "bfloat16_bfloat16": ("bfloat16", "bfloat16", "1.94e+03 2.18e+04 0.53 0.50 0.56 0.53"),
    "e4m3_e4m3_forward_only": ("MXFP8 E4M3", "MXFP8 E4M3, forward only", "1.57e+03 2.11e+04 0.52 0.49 0.55 0.53"),
    "e5m2_e5m2_forward_only": ("MXFP8 E5M2", "MXFP8 E5M2, forward only", "2.20e+03 3.98e+04 0.54 0.51 0.59 0.54"),
}


def title(arm: str) -> str:
    return " / ".join(PRINTED[arm][:2]) if arm in PRINTED else arm


def by_arm(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the runs of each arm that have a loss. The paper's arms come first, in the order of its table."""
    need_columns(runs, ("weight_activation", LOSS))
    arms = dict(list(runs.dropna(subset=LOSS).groupby(runs["weight_activation"].astype(str), sort=False)))
    if not arms:
        raise ValueError(f"no run has a {LOSS}")
    return {arm: arms[arm] for arm in dict.fromkeys([*PRINTED, *arms]) if arm in arms}


def pick(arms: dict[str, pd.DataFrame], names: Sequence[str] | None) -> dict[str, pd.DataFrame]:
    for name in set(names or ()) - arms.keys():
        raise ValueError(f"--arms: there is no arm {name}; choose from {', '.join(arms)}")
    return {name: arms[name] for name in names or arms}


def fit_arms(arms: dict[str, pd.DataFrame]) -> dict[str, Chinchilla]:
    laws = {}
    for arm, runs in arms.items():
        try:
            laws[arm] = fit(runs, LOSS)
        except ValueError as error:
            raise ValueError(f"{arm}: {error}") from None
    return laws


def constants(arms: dict[str, pd.DataFrame], laws: dict[str, Chinchilla], resamples: int) -> pd.DataFrame:
    """Return one row per arm and constant: arm, runs, constant, ours, low, high, printed, agrees.

    Numbers are text.
    """
    rows = []
    for arm, law in laws.items():
        intervals = bootstrap(arms[arm], LOSS, resamples).quantile([0.025, 0.975])
        printed = PRINTED[arm][2].split() if arm in PRINTED else ["-"] * len(FORMATS)
        for (name, digits), theirs in zip(FORMATS.items(), printed, strict=True):
            ours, low, high = (f"{value:{digits}}" for value in (getattr(law, name), *intervals[name]))
            agrees = "-" if theirs == "-" else "yes" if ours == theirs else "no"
            values = {"ours": ours, "low": low, "high": high, "printed": theirs, "agrees": agrees}
            rows.append({"arm": arm, "runs": len(arms[arm]), "constant": name} | values)
    return pd.DataFrame(rows)


def markdown(rows: pd.DataFrame) -> str:
    intervals = rows["low"] + " to " + rows["high"]
    cells = rows.assign(arm=rows["arm"].map(title), low=intervals).drop(columns="high").itertuples(index=False)
    return results.markdown(COLUMNS, cells, left={*COLUMNS} - NUMBERS) + "\n"


def draw(arms: dict[str, pd.DataFrame], laws: dict[str, Chinchilla]) -> Figure:
    abreast = min(len(laws), 3)
    width = TWO_COLUMNS if abreast > 1 else ONE_COLUMN
    figure, panels = rows_of_panels(len(laws), abreast, 1.7, 1, width, sharex=True, sharey=True)
    params = pd.concat([arms[arm]["params"] for arm in laws])
    norm = LogNorm(params.min(), params.max())
    for axes, (arm, law) in zip(panels.flat, laws.items(), strict=False):
        points = draw_arm(axes, arms[arm], law, norm)
        axes.set_title(title(arm).replace(" / ", " /\n"), fontsize=7)
    figure.supxlabel("compute 6 N D, FLOPs", fontsize=8)
    figure.supylabel("lowest validation loss", fontsize=8)
    figure.colorbar(points, ax=panels, label="parameters N", aspect=30)
    return figure


def draw_arm(axes: Axes, runs: pd.DataFrame, law: Chinchilla, norm: LogNorm) -> PathCollection:
    params, tokens = runs["params"].to_numpy(float), runs["tokens"].to_numpy(float)
    flops = 6 * params * tokens
    points = axes.scatter(flops, runs[LOSS], c=params, norm=norm, cmap="viridis", s=5, linewidths=0)
    budgets = np.geomspace(flops.min(), flops.max(), 100)
    best = law.optimal_params(budgets)
    axes.plot(budgets, law.loss(best, budgets / (6 * best)), color="black")
    axes.set_xscale("log")
    axes.annotate(f"a = {law.a:.2f}", (0.95, 0.9), xycoords="axes fraction", ha="right", fontsize=7)
    return points


@command
def main(arguments: Sequence[str] | None = None) -> None:
    options = figure_parser(NAME, __doc__, source_options)
    options.add_argument("--resamples", type=int, default=300, help="number of resamples for the intervals")
    options.add_argument("--arms", nargs="+", metavar="ARM", help="such as e4m3_bfloat16; all if not given")
    chosen = options.parse_args(arguments)
    with options.usage_errors((ValueError, OSError)):
        runs, said = read(options, chosen, __doc__)
        arms = pick(by_arm(runs), chosen.arms)
        laws = fit_arms(arms)
        rows = constants(arms, laws, chosen.resamples)
    save(draw(arms, laws), chosen, f"{said}\n{markdown(rows)}")


if __name__ == "__main__":
    main()
