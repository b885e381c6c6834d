"""Every benchmark runs small on CPU, and leaves a table and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import probes

pytestmark = pytest.mark.integration


def test_probes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probes.main(["--size", "tiny", "--rounds", "2", "--json", str(tmp_path / "probes.json")])
    written = json.loads((tmp_path / "probes.json").read_text())
    rows = {row["probes"]: row for row in written["rows"]}
    assert rows.keys() == probes.SETS.keys()
    assert written["provenance"]["commit"]
    assert "overhead" in capsys.readouterr().out
    for row in rows.values():
        assert row["overhead"] == pytest.approx(row["extra_ms"] / row["step_ms"] / row["every_steps"])
