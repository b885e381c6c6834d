"""Keep the finished cases of a benchmark that may be cut off, so that another call measures only what is missing."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from mxstudy.tracking.provenance import provenance

SAME = ("commit", "torch", "gpu")  # fields of the provenance that all rows of a table share


@functools.cache
def code() -> str:
    """Return the sha256 of all source files of mxstudy and benchmarks.

    A commit would not show uncommitted changes.
    """
    root = Path(__file__).parents[1]
    files = sorted(file for package in ("benchmarks", "mxstudy") for file in (root / package).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class Kept:
    """Keeps rows as lines of a file beside the JSON `out`. Rows of other code or another GPU are ignored."""

    def __init__(self, out: Path, device: torch.device) -> None:
        self.path = out.with_suffix(".jsonl")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.same = {key: provenance()[key] for key in SAME} | {"code": code(), "device": device.type}
        self.where = self.same["gpu"] if device.type == "cuda" else "CPU"
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # the last line may be cut off
        self.path.write_text("".join(whole))
        written = [json.loads(line) for line in whole]
        self.rows = [each["row"] for each in written if each["same"] == self.same]

    def rows_with(self, **case: Any) -> list[dict[str, Any]]:
        """Return the rows that have all these values."""
        return [row for row in self.rows if case.items() <= row.items()]

    def has(self, **case: Any) -> bool:
        return bool(self.rows_with(**case))

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps({"same": self.same, "row": row}) + "\n")
