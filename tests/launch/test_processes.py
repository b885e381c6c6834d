"""When several processes start together with the same command line, one decides and all run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import OWN_TEXT, SMALL, call, corpus
from gang import said, together

from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs
from mxstudy.tracking.journal import read_rows

pytestmark = pytest.mark.integration


def commands(folder: Path, *lines: list[str]) -> list[tuple[int, str]]:
    """Return the exit code and message of each command, in every process."""
    os.chdir(folder)
    return [call(*words) for words in lines]


def starts(run: RunFolder) -> list[int]:
    """Return with how many ranks the run was started, each time."""
    return [row["ranks"] for row in read_rows(run.journal_path)[0] if "ranks" in row]


@pytest.mark.slow
def test_torchrun_of_a_sweep_trains_each_run_once(tmp_path: Path) -> None:
    words = [*SMALL, *OWN_TEXT, corpus(tmp_path), "seed=0,1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*torchrun, "-m", "mxstudy", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"[{number}/2]") for number in (1, 2)] == [1, 1]
    runs = find_runs(tmp_path / "runs")
    assert [(run.status().state, starts(run)) for run in runs] == [("finished", [2])] * 2
    (tmp_path / "again").mkdir()
    assert together(tmp_path / "again", 2, commands, tmp_path, words) == [[(0, "")]] * 2
    assert said(tmp_path / "again").count("skipped: finished") == 2
    assert [starts(run) for run in runs] == [[2], [2]]


@pytest.mark.slow
def test_what_several_processes_cannot_share_is_refused_before_it_has_a_folder(tmp_path: Path) -> None:
    words = [*SMALL, *OWN_TEXT, corpus(tmp_path)]
    students = ["+experiment=student_teacher", "+debug=tiny", "runs_dir=runs", "tracking=none"]
    lines = [students, [*words, "train.batch_size=3"], [*words, "hydra/launcher=local"]]
    first, second = together(tmp_path / "gang", 2, commands, tmp_path, *lines)
    assert first == second
    assert first == [
        (
            1,
            "study: student_teacher runs in one process, but 2 were started together; start it without "
            "torchrun or srun",
        ),
        (1, "train.batch_size: 3 sequences do not divide over 2 ranks"),
        (
            1,
            "hydra/launcher: local and slurm start processes themselves, but 2 were started together; start it without "
            "torchrun or srun",
        ),
    ]
    assert not find_runs(tmp_path / "runs")


@pytest.mark.slow
def test_a_job_that_fails_ends_all_processes(tmp_path: Path) -> None:
    text = corpus(tmp_path, words=9000)  # too large to be read when the job is planned
    words = [*SMALL, *OWN_TEXT, text, "seed=0,1", "validation.sequences=100000"]
    assert together(tmp_path / "gang", 2, commands, tmp_path, words) == [[(1, "")]] * 2
    (failed,) = find_runs(tmp_path / "runs")
    assert failed.status().state == "failed"
    assert "validation.sequences" in (failed.status().reason or "")
    assert "[2/2]" not in said(tmp_path / "gang")
