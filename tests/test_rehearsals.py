"""Every experiment, end to end on a laptop: +debug=tiny through the command line, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_here
from each import slow_but

from mxstudy import cli
from mxstudy.tracking.folder import find_runs

EXPERIMENTS = sorted(path.stem for path in (cli.CONF / "experiment").glob("*.yaml"))
OF_EACH_KIND = {  # its study: the experiment of it that stands for the others in make test
    "approximation": "approximation",
    "evaluate": "olmes",
    "fork": "interventions",
    "perplexity": "perplexity",
    "prepare_data": "prepare_data",
    "pretrain": "quickstart",
    "student_teacher": "student_teacher",
}


@pytest.mark.integration
@pytest.mark.parametrize("name", slow_but(OF_EACH_KIND.values(), EXPERIMENTS))
def test_a_rehearsal_finishes(name: str, tmp_path: Path, cache: str, given_to: Callable[[str], list[str]]) -> None:
    run_here(tmp_path, f"+experiment={name}", "+debug=tiny", "tracking=none", cache, *given_to(name))
    (run,) = find_runs(tmp_path / "runs")
    assert run.status().state == "finished"
    assert run.config().experiment == name
    assert run.config().study in OF_EACH_KIND
    assert run.status().step == run.status().steps
