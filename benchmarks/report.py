"""What every benchmark leaves: a table on the terminal, and JSON that says where and from what it was measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

from mxstudy.tracking.provenance import provenance


def json_option(parser: argparse.ArgumentParser, name: str) -> None:
    """Where the rows of the benchmark of that name go."""
    what = "with machine, versions and commit; %(default)s if not given"
    parser.add_argument("--json", type=Path, default=Path(f"runs/{name}.json"), help=what)


def show(rows: list[dict[str, Any]]) -> None:
    """Numbers to four digits, a line a row."""
    print(pd.DataFrame(rows).to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"), flush=True)


def measured(rows: list[dict[str, Any]], path: Path, **settings: Any) -> None:
    """The rows, the benchmark's settings, and commit, versions, GPU and command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"provenance": provenance(), "settings": settings, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)
