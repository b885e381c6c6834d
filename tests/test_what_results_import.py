"""Reading results imports pandas, and nothing that trains, launches or tracks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "mlflow", "hydra", "omegaconf", "lm_eval", "datasets", "triton", "scipy.stats", "submitit"}
LIGHT = (
    "mxstudy",
    "mxstudy.reader",
    "mxstudy.config",
    "mxstudy.tracking.folder",
    "mxstudy.tracking.journal",
    "mxstudy.tracking.columnar_journal",
    "mxstudy.tracking.fetch",
    "mxstudy.tracking.arms",
    "mxstudy.tracking.mixed_backends",
    "mxstudy.probes",
    "mxstudy.probes.outcomes",
    "mxstudy.results",
)


def modules_after(program: str) -> set[str]:
    """Return the names of all modules that a fresh interpreter has after that program."""
    program += "\nimport json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.integration
def test_results_and_all_below_them_import_nothing_heavy() -> None:
    assert not HEAVY & modules_after("\n".join(f"import {module}" for module in LIGHT))


@pytest.mark.integration
@pytest.mark.parametrize("package", ["pyarrow", "pandas"])
def test_reading_a_runs_folder_needs_no_table_reader(package: str) -> None:
    assert package not in modules_after("import mxstudy.tracking.columnar_journal, mxstudy.tracking.fetch")


@pytest.mark.integration
def test_the_results_and_the_spike_score_of_the_library_are_had_without_torch() -> None:
    program = "import mxstudy; mxstudy.results; mxstudy.spike_score([1.0] * 9, window=8, tail=0.3, threshold=3.0)"
    assert not HEAVY & modules_after(program)


def test_the_library_itself_loads_nothing() -> None:
    assert not {"torch", "numpy", "pandas", "hydra"} & modules_after("import mxstudy; dir(mxstudy)")
