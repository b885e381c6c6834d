"""Export run folders to the compact Parquet tables of results/.

There is one row per run, step, validation, spike, measurement of a probe, and question of an evaluation, and all tables
of studies. Each replica of a stack counts as a run; --every-steps thins the metrics of large stacks.

python -m analysis.export --runs runs/mxnorm_pretrain --name mxnorm_pretrain [--to results]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from mxstudy import results

TEXTS = ["contexts", "continuations"]  # columns of samples; they are text of the data sets, not ours to copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, help="run folders, or folders of them")
    parser.add_argument("--name", required=True, help="the tables are called NAME_runs.parquet and so on")
    parser.add_argument("--to", type=Path, default=Path("results"))
    parser.add_argument("--every-steps", type=int, default=1, help="keep every N-th step of the metrics, and the last")
    arguments = parser.parse_args()
    try:
        folders = results.folders_of(arguments.runs)
    except ValueError as error:
        parser.error(str(error))
    tables = tables_of(folders)
    tables["metrics"] = thinned(tables["metrics"], arguments.every_steps)
    arguments.to.mkdir(parents=True, exist_ok=True)
    for kind, frame in tables.items():
        if len(frame):
            path = arguments.to / f"{arguments.name}_{kind}.parquet"
            results.write_table(frame, path, folders[0].provenance())
            print(f"{path}: {len(frame):,} rows, {path.stat().st_size / 1e6:.2f} MB")


def tables_of(folders: Sequence[results.RunFolder]) -> dict[str, pd.DataFrame]:
    """Return all tables by kind; some may be empty."""
    tables = {kind: load(folders) for kind, load in results.KINDS.items()}
    tables |= {probe: results.load_probe(folders, probe) for probe in {*results.PROBES, *results.STACK_PROBES}}
    left = [name for name in results.table_names(folders) if not name.startswith(results.SAMPLES)]
    tables |= {name: results.load_table(folders, name) for name in left}
    return tables | {"samples": tables["samples"].drop(columns=TEXTS, errors="ignore")}


def thinned(metrics: pd.DataFrame, every_steps: int) -> pd.DataFrame:
    if every_steps == 1 or not len(metrics):
        return metrics
    of_run = [key for key in ("fingerprint", "replica") if key in metrics]
    last = metrics.groupby(of_run, dropna=False)["step"].transform("max")
    return metrics[(metrics["step"] % every_steps == 0) | (metrics["step"] == last)]


if __name__ == "__main__":
    main()
