"""With a team's load on an MLflow server on PostgreSQL, every point arrives once, whatever is killed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import databases, tracking

pytestmark = pytest.mark.postgresql


def missing() -> str:
    """Return what of a PostgreSQL is not installed here, and how to install it."""
    if importlib.util.find_spec("psycopg") is None:
        return "no driver for PostgreSQL here: pip install 'psycopg[binary]'"
    try:
        databases.program("postgres")
    except FileNotFoundError as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_server_and_database_are_killed_under_sixteen_trainers(tmp_path: Path) -> None:
    small = ["--databases", "postgresql", "--trainers", "16", "--seconds", "12", "--away-s", "4"]
    tracking.main([*small, "--checkpoint-steps", "20", "--json", str(tmp_path / "tracking.json")])
    rows = json.loads((tmp_path / "tracking.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["undisturbed", "killed", "database_killed"]
    for row in rows:
        assert (row["points"], row["missing"], row["extra"], row["gave_up"]) == (16 * 120 * 20, 0, 0, 0)
        assert row["warnings"] > 0 or row["case"] == "undisturbed"  # there too, on a loaded machine that answers late
