"""Benchmarks of all that surrounds a step run small on CPU, and every benchmark says where it writes."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from commands import run_here
from pyarrow import parquet

from benchmarks import (
    checkpoint,
    data,
    evaluation,
    launch,
    probes,
    soak,
    tracking,
)
from benchmarks.disturbed import Ended
from mxstudy.tracking.found_runs import find_runs

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(probes, "WARMUP_ROUNDS", 0)  # nothing is compiled
    monkeypatch.setattr(probes, "STEPS", 1)
    probes.main(["--size", "tiny", "--rounds", "1", "--json", str(tmp_path / "probes.json")])
    written = json.loads((tmp_path / "probes.json").read_text())
    rows = {row["probes"]: row for row in written["rows"]}
    assert rows.keys() == probes.SETS.keys()
    assert written["provenance"]["commit"]
    assert "overhead" in capsys.readouterr().out
    for row in rows.values():
        assert row["overhead"] == pytest.approx(row["extra_ms"] / row["step_ms"] / row["every_steps"])


@pytest.mark.slow
def test_evaluation(tmp_path: Path, evaluation_sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = (
        "train.sequence_length=256",
        "train.steps=1",
        "train.batch_size=1",
    )  # HFLM truncates no part of a question
    run_here(
        tmp_path, "+experiment=quickstart", "precision=bf16", "+debug=tiny", "runs_dir=runs", "tracking=none", *longer
    )
    (run,) = find_runs(tmp_path / "runs")
    words = ["--checkpoint", str(run.path), "--data-dir", str(evaluation_sets), "--tasks", "csqa", "winogrande"]
    evaluation.main([*words, "--batch-sizes", "2", "8", "--rounds", "3", "--json", str(tmp_path / "evaluation.json")])
    written = json.loads((tmp_path / "evaluation.json").read_text())
    rows = {row["who"]: row for row in written["rows"]}
    assert sorted(list(rows)[:2]) == ["HFLM, bf16, batch 2", "HFLM, bf16, batch 8"]
    assert list(rows)[2:] == [
        "ours, bf16",
        "forwards of ours, bf16, alone",
        "ours, rmsnorm, mxfp8, compute bf16",
        "forwards of ours, mxfp8, alone",
    ]
    assert {row["requests"] for row in rows.values()} == {5 * 5 * 2 + 5 * 2}
    assert [row["rounds"] for row in rows.values()] == [1, 3, 3, 3, 3, 3]
    once, best = list(rows.values())[:2]  # the first one was not run again
    assert once["over_hflm"] == pytest.approx(once["requests_per_s"] / best["requests_per_s"])
    for row in rows.values():
        assert row["requests_per_s"] == pytest.approx(row["requests"] / row["seconds"])
    for row in list(rows.values())[1:]:
        over = sorted(other / own for own, other in zip(row["rounds_s"], best["rounds_s"], strict=True))
        assert [row["least_over"], row["over_hflm"], row["most_over"]] == pytest.approx(over)
    assert "over_hflm" in capsys.readouterr().out


NAMES = (
    "attention",
    "all_gather",
    "checkpoint",
    "evaluation",
    "experts",
    "head_loss",
    "kernel_tiles",
    "kernels",
    "layers",
    "operands",
    "probes",
    "scaling",
    "soak",
    "student_teacher",
    "tracking",
    "train_step",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_writes_without_being_asked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert f"default: runs/{name}.json" in " ".join(capsys.readouterr().out.split())


def test_an_evaluation_of_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluation.main(["--checkpoint", "nope", "--runs-dir", str(tmp_path)])
    assert "nope" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    launch.main(["--jobs", "10", "--rounds", "1", "--json", str(tmp_path / "launch.json")])
    written = json.loads((tmp_path / "launch.json").read_text())
    *sweeps, dry_run, config = written["rows"]
    assert [(row["vary_in"], row["jobs"]) for row in sweeps] == [("values", 10), ("groups", 12)]
    assert (dry_run["prints"], config["prints"]) == ("dry run", "config")
    assert written["settings"]["queue"] == "a stand-in for sbatch"
    assert "slowest_s" in capsys.readouterr().out


@pytest.mark.slow
def test_checkpoint(tmp_path: Path) -> None:
    sizes = ["--model", "llama_125m", "--layers", "1", "--vocabulary", "64", "--rounds", "2", "--seconds", "0"]
    checkpoint.main([*sizes, "--folder", str(tmp_path), "--json", str(tmp_path / "checkpoint.json")])
    written = json.loads((tmp_path / "checkpoint.json").read_text())
    rows, settings = written["rows"], written["settings"]
    assert settings["rounds"] == 1  # there is no time for the second
    assert [row["what"] for row in rows] == list(checkpoint.KINDS)
    assert 0 < settings["checksums_of_a_save_s"] < rows[0]["with_s"]
    for row in rows:
        assert row["added"] == pytest.approx(row["with_s"] / row["without_s"] - 1)


@pytest.mark.slow
def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A trial is the same whenever it is drawn, and ends as if nothing had happened.

    The benchmark sees what would differ.
    """
    drawn = [soak.drawn(3, number, list(soak.KINDS), True) for number in range(40)]
    assert drawn == [soak.drawn(3, number, list(soak.KINDS), True) for number in range(40)]
    assert {trial.disk for trial in drawn} == {soak.SMALL, soak.LARGE}
    small = ["--seconds", "1", "--only", "stack of students", "--json", str(tmp_path / "soak.json")]
    assert soak.main(small) == 0
    (row, everything) = json.loads((tmp_path / "soak.json").read_text())["rows"]
    assert (row["trials"], row["lost"]) == (everything["trials"], 0) == (1, 0)
    monkeypatch.setattr(soak, "run", lambda *_: Ended(code=0, said="", seconds=1.0, writes=1, disturbed=True))
    monkeypatch.setattr(soak, "left_in", lambda folder: {"run": folder.name})
    assert soak.main(small) == 1
    assert "LOST: differs: run" in capsys.readouterr().out


@pytest.mark.slow
def test_tracking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever happens to the server, all points arrive once and soon, and the trainers do not notice."""
    small = ["--trainers", "2", "--seconds", "4", "--away-s", "2", "--checkpoint-steps", "10", "--workers", "1"]
    tracking.main([*small, "--json", str(tmp_path / "tracking.json")])
    written = json.loads((tmp_path / "tracking.json").read_text())
    assert [row["case"] for row in written["rows"]] == ["undisturbed", "killed", "read_only"]
    for row in written["rows"]:
        assert (row["points"], row["missing"], row["extra"], row["gave_up"]) == (2 * 40 * 20, 0, 0, 0)
        assert row["arrived_s"] <= 60
        assert row["log_ms"] <= 1
        assert row["warnings"] > 0 or row["case"] == "undisturbed"  # a busy machine's server may be late as well
    assert written["settings"]["trainers"] == 2
    assert "arrived_s" in capsys.readouterr().out


def test_tracking_sees_what_is_lost_and_what_is_doubled() -> None:
    sent = [("a", "train/loss", step, 0.5, 1000 * step) for step in range(4)]
    trained = [tracking.Trained([0.0005, 0.0001], 0.0, 3.0, 1.0, [], None)]
    assert tracking.judged(trained, Counter(sent), Counter(sent))["within_limits"]
    for found, missing, extra in ((sent[1:], 1, 0), (sent + sent[:1], 0, 1), (sent[1:] + sent[1:2], 1, 1)):
        row = tracking.judged(trained, Counter(sent), Counter(found))
        assert (row["missing"], row["extra"], row["within_limits"]) == (missing, extra, False)


@pytest.mark.slow
def test_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--tokens", "20000", "--steps", "3", "--batch-size", "4", "--sequence-length", "64"]
    texts = [f"{number} spells <|endoftext|> and has not ended" for number in range(200)]
    parquet.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet")
    words = ["--texts", str(tmp_path / "texts.parquet"), "--workers", "2", "--rounds", "1"]
    data.main([*small, *words, "--json", str(tmp_path / "data.json")])
    written = json.loads((tmp_path / "data.json").read_text())
    batches = [row for row in written["rows"] if "batches_from" in row]
    assert [row["batches_from"] for row in batches] == ["memory", "disk"]
    for row in batches:
        assert row["times_gpu"] == pytest.approx(row["tokens_per_s"] / written["settings"]["gpu_tokens_per_s"])
    ours, *theirs = (row for row in written["rows"] if "tokenising" in row)
    assert ours["tokenising"] == "prepare"
    assert len(theirs) == len(data.MAP_BATCHES)
    for row in [ours, *theirs]:
        assert row["over_map"] == pytest.approx(row["tokens_per_s"] / max(one["tokens_per_s"] for one in theirs))
    assert "over_map" in capsys.readouterr().out


def test_the_gpu_of_the_data_benchmark_is_the_one_that_was_measured() -> None:
    """It is the fastest arm of the page that the benchmark names."""
    page = (Path(data.__file__).parents[1] / "results" / "mxnorm_pretrain.md").read_text()
    arms = [line.split("|") for line in page.splitlines() if " GiB |" in line]
    assert max(int(cells[6].replace(",", "")) for cells in arms) == data.GPU_TOKENS_PER_S
