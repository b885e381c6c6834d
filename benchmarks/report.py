"""Report a benchmark: a table on the terminal, and JSON with the rows, settings and provenance."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

from mxstudy.tracking.provenance import provenance


def json_option(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the option --json: the file for the rows of the benchmark of that name."""
    text = "output file, with machine, versions and commit; default: %(default)s"
    parser.add_argument("--json", type=Path, default=Path(f"runs/{name}.json"), help=text)


def training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options --eager and --device of a benchmark that trains a decoder."""
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table, one line each, with numbers to four digits."""
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"), flush=True)


def measured(rows: list[dict[str, Any]], path: Path, **settings: Any) -> None:
    """Write the rows, the benchmark's settings, and commit, versions, GPU and command to `path`, and print the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"provenance": provenance(), "settings": settings, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)
