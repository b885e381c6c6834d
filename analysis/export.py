"""Run folders to the compact Parquet tables of results/: one row a run, one row a step, one row a probe measurement.

python -m analysis.export --runs runs/mxnorm_pretrain --name mxnorm_pretrain [--to results]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mxstudy import results

PROBES = ("norm_output_rms", "activation_histograms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, help="run folders, or folders of them")
    parser.add_argument("--name", required=True, help="the tables are called NAME_runs.parquet and so on")
    parser.add_argument("--to", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    folders = results.folders_of(arguments.runs)
    tables = {
        "runs": results.load_runs(folders),
        "metrics": results.load_metrics(folders),
        "validation": results.load_validations(folders),
    } | {probe: results.load_probe(folders, probe) for probe in PROBES}
    arguments.to.mkdir(parents=True, exist_ok=True)
    for kind, frame in tables.items():
        if len(frame):
            path = arguments.to / f"{arguments.name}_{kind}.parquet"
            results.write_table(frame, path, folders[0].provenance())
            print(f"{path}: {len(frame):,} rows, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
