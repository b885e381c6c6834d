"""Describe a figure or table: what it shows, from which runs, and how these are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from analysis.ledger.tables import RESULTS

BENCHMARK = ("benchmark",)


@dataclass(frozen=True)
class Figure:
    """A figure or table. `name` is that of its files. `kinds` are the kinds of rows that it is drawn from.

    `results` are prefixes of the tables in results/ that have these rows, separated by spaces, or None. `command` makes
    the folders `runs`. `script` is its module below analysis, by default the name with its first _ as a dot.
    `arguments` are further arguments of the script.
    """

    name: str
    shows: str
    kinds: tuple[str, ...]
    command: str
    runs: str
    results: str | None = None
    script: str | None = None
    arguments: str = ""

    @property
    def module(self) -> str:
        return f"analysis.{self.script or self.name.replace('_', '.', 1)}"

    @property
    def tables(self) -> list[Path]:
        return [RESULTS / name for name in (self.results or "").split()]

    def backing(self) -> list[Path]:
        """Return the tables in results/ that it is drawn from, or the JSON files of benchmarks."""
        endings = [".json"] if self.kinds == BENCHMARK else [f"_{kind}.parquet" for kind in self.kinds]
        return [table.with_name(table.name + ending) for table in self.tables for ending in endings]

    def options(self, runs: str) -> list[str]:
        return ["--runs", *runs.split(), *self.arguments.split(), *(["--name", self.name] if self.script else [])]


def sweep(*names: str) -> tuple[str, str]:
    """Return the commands of sweeps, and the folders of their runs."""
    return " && ".join(f"python -m mxstudy +sweep={name}" for name in names), " ".join(f"runs/{name}" for name in names)


def benchmark(name: str) -> tuple[str, str]:
    """Return the command of a benchmark, and the file that it writes."""
    return f"python -m benchmarks.{name}", f"runs/{name}.json"
