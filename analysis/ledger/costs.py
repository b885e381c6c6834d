"""State the GPU time that a verdict would take: minutes of one H200 for a unit, at rates that were measured."""

from __future__ import annotations

import pandas as pd

from analysis.ledger.claim import Cost
from analysis.ledger.measured import benchmark
from analysis.ledger.tables import Missing, Tables

PEAK = 989e12  # bf16 FLOP/s of an H100 or H200 without sparsity, by NVIDIA's data sheet, as in every MFU of results/
PROCESSES = 4  # run side by side on one GPU, in the pilot of the main question
REPLICA_STEPS_PER_S = {"mx": 1100.0, "fp32": 300.0}  # of 4 x 512, starts included: results/prestated.md, lot 2


def gpu_hours(tables: Tables, parameters: float, tokens: float, runs: int) -> float:
    """Return the hours of one H200 for runs of 6 N D FLOPs each, at the share of peak of llama_1b in MXFP8."""
    rows = benchmark(tables, "scaling")
    own = rows[(rows["model"] == "llama_1b") & (rows["precision"] == "mxfp8") & (rows["gpus"] == 1)]
    return 6 * parameters * tokens * runs / (float(own["mfu"].iloc[0]) * PEAK) / 3600


def together(pilot: pd.DataFrame) -> float:
    """Return the total tokens/s of the pilot's processes, each a 23M Llama in MXFP8 on one shared H200."""
    return PROCESSES * float(pilot["tokens_per_s"].median())


def side_by_side(tables: Tables) -> float:
    """Return the same from the pilot's own table, even if other tables replace those in results/."""
    pilot = tables.one("mxnorm_equivalence_pilot", "runs")
    if pilot is None:
        raise Missing("no table mxnorm_equivalence_pilot_runs")
    return together(pilot)


def llama_23m(tokens: float) -> Cost:
    """Return the cost of 23M Llamas that train on `tokens` together, at the rate in MXFP8."""
    return lambda tables: tokens / side_by_side(tables) / 60


def like_those_of(table: str, tokens: float, runs: int) -> Cost:
    """Return the cost of runs on `tokens` each, one after the other, at the mean pace of the runs in a table."""

    def cost(tables: Tables) -> float:
        own = tables.load("runs", table)
        return runs * tokens * float((1 / own["tokens_per_s"]).mean()) / 60

    return cost


def students(mx: float = 0.0, fp32: float = 0.0) -> Cost:
    """Return the cost of so many replica-steps of students in MX formats and in FP32, of 4 layers and width 512."""
    seconds = mx / REPLICA_STEPS_PER_S["mx"] + fp32 / REPLICA_STEPS_PER_S["fp32"]
    return lambda tables: seconds / 60
