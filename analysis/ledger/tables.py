"""Load the tables that claims are judged from: those in results/, or any runs put in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from mxstudy import results

RESULTS = Path("results")


class Missing(Exception):
    """Raised for a table that does not exist, or holds none of the runs that a claim needs: the claim was not run."""


@dataclass
class Tables:
    """Tables by name, such as overflow, and kind, such as runs.

    `instead` are frames, by kind, that replace all tables.
    """

    folder: Path = RESULTS
    instead: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    read: dict[tuple[str, str], pd.DataFrame] = field(default_factory=dict)

    def load(self, kind: str, *names: str) -> pd.DataFrame:
        """Return the rows of one kind from all these names that exist. Raises Missing if none does."""
        if self.instead:
            if kind not in self.instead:
                raise Missing(f"no {kind}")
            return self.instead[kind]
        found = [frame for name in names if (frame := self.one(name, kind)) is not None]
        if not found:
            raise Missing(f"no table {' or '.join(f'{name}_{kind}' for name in names)}")
        rows = pd.concat(found, ignore_index=True)
        return rows.drop_duplicates(["fingerprint", "replica", "commit"]) if self.is_of_stacks(rows) else rows

    def one(self, name: str, kind: str) -> pd.DataFrame | None:
        path = self.folder / name
        if results.table_of(path, kind) is None:
            return None
        if (name, kind) not in self.read:
            self.read[name, kind] = results.load([path], kind)
        return self.read[name, kind]

    @staticmethod
    def is_of_stacks(rows: pd.DataFrame) -> bool:
        """Return whether these are runs of students. Several tables repeat such runs if they share a baseline."""
        return {"fingerprint", "replica", "commit"} <= set(rows)
