"""Every benchmark runs small on CPU, and leaves a table and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run_here

from benchmarks import evaluation, probes
from mxstudy.tracking.folder import find_runs

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


def test_evaluation(tmp_path: Path, evaluation_sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = (
        "train.sequence_length=256",
        "train.steps=1",
        "train.batch_size=1",
    )  # HFLM truncates nothing of a question
    run_here(tmp_path, "+experiment=quickstart", "precision=mxfp8", "+debug=tiny", "tracking=none", *longer)
    (run,) = find_runs(tmp_path / "runs")
    words = ["--checkpoint", str(run.path), "--data-dir", str(evaluation_sets), "--tasks", "csqa", "winogrande"]
    evaluation.main([*words, "--batch-sizes", "2", "8", "--rounds", "1", "--json", str(tmp_path / "evaluation.json")])
    written = json.loads((tmp_path / "evaluation.json").read_text())
    rows = {row["who"]: row for row in written["rows"]}
    assert list(rows)[:3] == ["HFLM, bf16, batch 2", "HFLM, bf16, batch 8", "ours, bf16"]
    assert {row["requests"] for row in rows.values()} == {5 * 5 * 2 + 5 * 2}
    best = max(rows["HFLM, bf16, batch 2"]["requests_per_s"], rows["HFLM, bf16, batch 8"]["requests_per_s"])
    for row in rows.values():
        assert row["requests_per_s"] == pytest.approx(row["requests"] / row["seconds"])
        assert row["over_hflm"] == pytest.approx(row["requests_per_s"] / best)
    assert "over_hflm" in capsys.readouterr().out
