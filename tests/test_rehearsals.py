"""Every experiment, end to end on a laptop: +debug=tiny through the command line, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run_here
from quiz import given_to

from mxstudy import cli
from mxstudy.tracking.folder import RunFolder, find_runs

EXPERIMENTS = sorted(path.stem for path in (cli.CONF / "experiment").glob("*.yaml"))


@pytest.mark.integration
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_rehearsal_finishes(name: str, tmp_path: Path, trained: RunFolder, evaluation_sets: Path) -> None:
    cache = tmp_path.parent / "cache"  # one corpus for all of them
    given = given_to(name, trained, evaluation_sets)
    run_here(tmp_path, f"+experiment={name}", "+debug=tiny", "tracking=none", f"cache_dir={cache}", *given)
    (run,) = find_runs(tmp_path / "runs")
    assert run.status().state == "finished"
    assert run.config().experiment == name
    assert run.status().step == run.status().steps
