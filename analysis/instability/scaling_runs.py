"""Read N, D and loss of runs of many sizes, by arm, from run folders or from losses that a paper's authors publish."""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from analysis.command import Parser, without_command
from analysis.style import caption, load_chosen, runs_option
from analysis.units import WIDTH, need_columns

TRAINED_ROWS, COUNTED_ROWS = 32_100, 32_000  # rows of the embedding in the paper's public code, and in its N
LOSS = "min_val_loss"  # the column of the authors' published losses that gives the paper's constants

# {precision here: the arm's name in the published losses of the instability paper}
PRECISIONS = {
    "mxfp6_e2m3_bf16_act": "e2m3_bfloat16",
    "mxfp8_bf16_act": "e4m3_bfloat16",
    "mxfp8_e5m2_bf16_act": "e5m2_bfloat16",
    "bf16": "bfloat16_bfloat16",
    "mxfp8_forward_only": "e4m3_e4m3_forward_only",
    "mxfp8_e5m2_forward_only": "e5m2_e5m2_forward_only",
}


def source_options(options: argparse.ArgumentParser) -> None:
    """Add --losses as an alternative to --runs."""
    source = options.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--losses", type=Path, metavar="FILE.csv", help="weight_activation, params, tokens, min_val_loss"
    )
    runs_option(source)


def read(options: Parser, chosen: argparse.Namespace, shows: str | None) -> tuple[pd.DataFrame, str]:
    """Return one row per run (weight_activation, params, tokens, min_val_loss), and the text of the caption."""
    if chosen.losses:
        if chosen.only or chosen.without:
            options.error("--only, --without: only apply to --runs; a file of losses has no labels")
        return from_csv(chosen.losses, shows)
    return from_runs(load_chosen(options, chosen, "runs")[0], shows)


def from_csv(path: Path, shows: str | None) -> tuple[pd.DataFrame, str]:
    runs = pd.read_csv(path)
    need_columns(runs, [LOSS])
    missing = f"{len(runs)} rows, {runs[LOSS].isna().sum()} of them without a loss"
    return runs, f"{without_command(shows)}\n\n- {path.name}: {missing}\n"


def uncounted(runs: pd.DataFrame) -> pd.Series | int:
    """Return the parameters that the paper's N leaves out: the rows that its code adds to embedding and head."""
    if "config.model.vocab_size" not in runs:
        return 0
    added = (runs["config.model.vocab_size"] == TRAINED_ROWS) * (TRAINED_ROWS - COUNTED_ROWS)
    return 2 * added * runs[WIDTH]


def from_runs(table: pd.DataFrame, shows: str | None = None) -> tuple[pd.DataFrame, str]:
    """Return the finished runs of a runs table with the columns and arm names of the CSV, and the caption.

    Arms that the CSV does not have are named 'PRECISION NORM'.
    """
    train = ["config.train.batch_size", "config.train.sequence_length"]
    need_columns(table, ["parameters", "best_validation_loss", *train])
    done = table[table["state"] == "finished"]
    ours = done["choice.precision"] + " " + done["choice.norm"]
    theirs = done["choice.precision"].map(PRECISIONS).where(done["choice.norm"] == "layernorm")
    runs = {
        "weight_activation": theirs.fillna(ours),
        "params": done["parameters"] - uncounted(done),
        "tokens": done["step"] * done[train[0]] * done[train[1]],
        LOSS: done["best_validation_loss"],
    }
    return pd.DataFrame(runs), caption(done, shows)
