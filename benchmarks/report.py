"""Report a benchmark: a table on the terminal, and JSON with the rows, settings and provenance."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch

from mxstudy.tracking.provenance import provenance


def options_of(name: str, shows: str | None) -> argparse.ArgumentParser:
    """Return the parser of the benchmark of that name, with the option --json: the file for its rows.

    `shows` is its docstring.
    """
    parser = argparse.ArgumentParser(description=shows, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "output file, with machine, versions and commit; default: %(default)s"
    parser.add_argument("--json", type=Path, default=Path(f"runs/{name}.json"), help=text)
    return parser


def device_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --device."""
    parser.add_argument("--device", type=there, choices=["auto", "cpu", "cuda"], default="auto")


def there(device: str) -> str:
    """Return the name of the device. Raises ArgumentTypeError for cuda without a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("cuda was asked for, but there is no GPU; --device cpu runs here")
    return device


def positive(word: str) -> int:
    """Return the whole number that a word is. Raises ArgumentTypeError if it is below 1."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def training_options(parser: argparse.ArgumentParser) -> None:
    """Add the options --eager and --device of a benchmark that trains a decoder."""
    parser.add_argument("--eager", action="store_true", help="do not compile")
    device_option(parser)


def show(rows: list[dict[str, Any]], without: Collection[str] = ()) -> None:
    """Print the rows as a table without some columns, one line each, with numbers to four digits."""
    shown = [{key: value for key, value in row.items() if key not in without} for row in rows]
    print(pd.DataFrame(shown).to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"), flush=True)


def machine() -> dict[str, Any]:
    """Return the cores and the memory of this machine."""
    return {"cores": psutil.cpu_count(), "memory_gib": psutil.virtual_memory().total / 2**30}


def measured(rows: list[dict[str, Any]], path: Path, **settings: Any) -> None:
    """Write the rows, the benchmark's settings, and commit, versions, GPU and command to `path`, and print the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"provenance": provenance(), "settings": settings, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path)
