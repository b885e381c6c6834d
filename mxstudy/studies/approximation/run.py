"""Run the approximation study: measure MXNorm's and the casts' errors (MXNorm paper, sections 3.3 to 3.6).

Nothing is trained: random tensors go through norms and casts on the CPU. Every measurement is a table in the run's
folder, from which analysis/ draws figures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from mxstudy import results
from mxstudy.config import Approximation
from mxstudy.results import terminal as tables
from mxstudy.studies.approximation.recipe_errors import recipe_errors
from mxstudy.studies.approximation.tables import TABLES, Measure
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import figures_of
from mxstudy.tracking.journal import replace_journal
from mxstudy.train.recorder import finish_and_mirror

FIGURES = ("mxnorm.fig02_approximation", "mxnorm.theorem1_bounds", "recipe.cast_quality", "recipe.formats_table")


def run(config: Approximation, folder: RunFolder, label: str) -> str:
    """Measure every missing table and return the run's state.

    A table takes seconds, so a killed run simply continues with the missing ones.
    """
    tables = tables_of(config)
    with folder.lock(), folder.heartbeat():
        folder.update(state="running", steps=len(tables), reason=None)
        for step, (name, measure) in enumerate(tables.items()):
            if not results.table_path(folder, name).exists():
                print(f"{label}  {name}", flush=True)
                results.save_table(folder, name, pd.DataFrame(measure(config)))
            folder.update(step=step + 1)
        record(folder)
        report(folder, tables)
        finish_and_mirror(config, folder, label)
    return "finished"


def tables_of(config: Approximation) -> dict[str, Measure]:
    """Return the measurements of a run by the names of their tables."""
    return TABLES | ({"recipe_errors": recipe_errors} if config.precisions else {})


def record(folder: RunFolder) -> None:
    """Write the journal for MLflow's charts: mean r^2, and estimated RMS / true RMS, by number of blocks."""
    fidelity, convergence = (results.load_table([folder], name) for name in ("fidelity", "convergence"))
    r_squared = fidelity.groupby(["blocks", "block_size", "p"])["r_squared"].mean()
    ratios = convergence.set_index(["blocks", "distribution", "p"])["mean"]
    rows = []
    for blocks in sorted({*fidelity["blocks"], *convergence["blocks"]}):
        values = {f"B{b}_p{p:g}/r_squared": v for (n, b, p), v in r_squared.items() if n == blocks}
        values |= {f"{name}_p{p:g}/rms_ratio": v for (n, name, p), v in ratios.items() if n == blocks}
        rows.append({"step": int(blocks), "probe": "approximation", "values": values})
    replace_journal(folder.journal_path, rows)


# ------------------------------------------------------------------------------------------------- on the terminal


def report(folder: RunFolder, measured: Collection[str]) -> None:
    console = Console(highlight=False)
    for show in SHOWN:
        console.print(show(folder))
    if "recipe_errors" in measured:
        console.print(*show_recipe_errors(folder), sep="\n")
    print(how_to_draw(folder), flush=True)


def how_to_draw(*folders: RunFolder) -> str:
    """Return the commands that draw the figures of these runs."""
    paths = " ".join(str(folder.path) for folder in folders)
    commands = [f"  python -m mxstudy figure {name} --runs {paths}" for name in FIGURES]
    return "\n".join([f"figures, into {figures_of(folders)}/:", *commands])


def grid(title: str, *columns: str) -> Table:
    """Return an empty table that fits into 80 columns: a left-aligned column of names, then numbers."""
    return tables.grid(title, columns, left=columns[:1])


def show_formats(folder: RunFolder) -> Table:
    table = grid("formats", "format", "max", "min subnormal", "binades", "scale")
    for row in results.load_table([folder], "formats").to_dict("records"):
        smallest = f"2^{math.log2(row['min_subnormal']):.0f}"
        table.add_row(row["format"], f"{row['max']:g}", smallest, f"{row['binades']:.1f}", row["scale"])
    return table


def show_fidelity(folder: RunFolder) -> Table:
    columns = [f"B={block_size} p={p}" for block_size in (16, 32, 64) for p in (1, 2)]
    table = grid("r^2 of MXNorm against RMSNorm + MXCast, mean over draws", "blocks", *columns)
    means = results.load_table([folder], "fidelity").pivot_table("r_squared", "blocks", ["block_size", "p"])
    for blocks, row in means.iterrows():
        table.add_row(str(blocks), *(f"{value:.5f}" for value in row))
    return table


def show_convergence(folder: RunFolder) -> Table:
    """Return the table of Theorem 1; with infinitely many rows its last column would be -0.5 (law of large numbers)."""
    rows = results.load_table([folder], "convergence")
    title = f"MXNorm's RMS over the true one, rows of {rows['blocks'].max()} blocks (Theorem 1)"
    table = grid(title, "rows", "p", "limit", "mean", "std", "slope of log std in log blocks")
    for (name, p), group in rows.groupby(["distribution", "p"]):
        longest = group.loc[group["blocks"].idxmax()]
        slope = np.polyfit(np.log(group["blocks"]), np.log(group["std"]), 1)[0]
        numbers = (f"{longest[key]:.4f}" for key in ("limit", "mean", "std"))
        table.add_row(name, f"{p:g}", *numbers, f"{slope:.3f}")
    return table


def show_bounds(folder: RunFolder) -> Table:
    table = grid("|x / rms| and its bound (Lemmas 1 and 2)", "input", "norm", "bound", "largest", "rms / true")
    for row in results.load_table([folder], "bounds").to_dict("records"):
        numbers = (f"{row[key]:.3f}" for key in ("bound", "absmax", "rms_ratio"))
        table.add_row(row["input"], row["norm"], *numbers)
    return table


def show_norm_bounds(folder: RunFolder) -> Table:
    """Return the table of X in NVFP4, without a transform; the ratio is that of the bound and X's absmax."""
    columns = ("norm", "ratio", "dB", "dB*", "< 2^-6", "< 2^-6*")
    table = grid("X in NVFP4 under its absmax, or under the norm's bound (*)", "input", *columns)
    rows = results.load_table([folder], "norm_bounds").query("cast == 'NVFP4' and hadamard == 0")
    for cell, own in rows.groupby(["input", "norm"], sort=False):
        by_outer = own.set_index("outer_scale").loc[["tensor", "bound"]]
        ratio = by_outer["bound"].iloc[0] / by_outer["largest"].iloc[0]
        noise = (f"{value:.1f}" for value in by_outer["cast_sqnr_db"])
        shares = (f"{100 * value:.1f} %" for value in by_outer["subnormal_scales"])
        table.add_row(*cell, f"{ratio:.1f}", *noise, *shares)
    return table


def show_quality(folder: RunFolder) -> Table:
    columns = ("gain", "bf16, away", "SQNR dB", "over max", "to zero")
    table = grid("casts of a Gaussian, half to even; gain of bf16 half away", "format", "scale rule", *columns)
    rows = results.load_table([folder], "quality").query("input == 'gaussian'").set_index(["format", "scale_rule"])
    away = rows[(rows["rounding"] == "away") & rows["pre_round"]]["gain"]
    for cast, row in rows[(rows["rounding"] == "even") & ~rows["pre_round"]].iterrows():
        shares = (f"{100 * row[key]:.2f} %" for key in ("overflow", "underflow"))
        table.add_row(*cast, f"{row['gain']:.4f}", f"{away[cast]:.4f}", f"{row['sqnr_db']:.2f}", *shares)
    return table


def show_inputs(folder: RunFolder) -> Table:
    columns = (f"{quantity}, {rule}" for quantity in ("gain", "over max") for rule in ("floor", "rceil"))
    table = grid("E4M3, half to even", "input", *columns)
    rows = results.load_table([folder], "quality").query("format == 'E4M3' and rounding == 'even' and not pre_round")
    by_rule = rows.pivot_table(["gain", "overflow"], "input", "scale_rule", sort=False)
    for name, row in by_rule.iterrows():
        gains = (f"{row['gain', rule]:.4f}" for rule in ("floor", "rceil"))
        shares = (f"{100 * row['overflow', rule]:.2f} %" for rule in ("floor", "rceil"))
        table.add_row(name, *gains, *shares)
    return table


SHOWN = (
    show_formats,
    show_fidelity,
    show_convergence,
    show_bounds,
    show_norm_bounds,
    show_quality,
    show_inputs,
)  # the tables of every run, in this order


def show_recipe_errors(folder: RunFolder) -> Iterator[Table]:
    """Yield a table of SQNRs for each input. The second line of a precision is without its Hadamard transforms."""
    rows = results.load_table([folder], "recipe_errors")
    short = {name: name.replace("forward", "fwd") for name in rows["operand"].unique()}
    for input_name, own in rows.groupby("input", sort=False):
        title = f"SQNR of operands, dB: {input_name}; std over draws up to {own['sqnr_db_std'].max():.1f}"
        table = grid(title, "precision", *short.values())
        for key, measured in own.groupby("precision", sort=False):
            is_without = measured.duplicated(["recipe", "operand"])
            for name, part in ((key, measured[~is_without]), ("  unrotated", measured[is_without])):
                sqnr = part.groupby("operand")["sqnr_db"].mean()
                if len(sqnr):
                    table.add_row(name, *(f"{sqnr[each]:.1f}" if each in sqnr else "-" for each in short))
        yield table
