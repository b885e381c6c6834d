import os

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # the workers share the cores, and tensors here are too small for two threads
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import forked
import pytest
import torch
from commands import book, run_here
from quiz import write_sets
from traced import run_graphs_as_they_are

from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.found_runs import find_runs

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which any compilation may do first

torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # takes milliseconds each time, and only a power failure needs it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests that may take longest, because the last test that begins keeps the others waiting."""
    limits = {item: marker.args[0] for item in items if (marker := item.get_closest_marker("timeout"))}
    items.sort(key=lambda item: -limits.get(item, 0))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, which is also the one that commands run in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def figure_rules() -> Iterator[None]:
    """Check that every figure that the test has drawn breaks no rule."""
    from figure_rules import broken  # takes a second, and chooses matplotlib's backend
    from matplotlib import pyplot as plt

    plt.close("all")  # figures of other tests
    yield
    drawn = [plt.figure(number) for number in plt.get_fignums()]
    found = [rule for figure in drawn for rule in broken(figure)]
    plt.close("all")
    assert found == []


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    run_graphs_as_they_are(monkeypatch)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the override that has all runs prepare a corpus once."""
    return f"cache_dir={tmp_path_factory.mktemp('cache')}"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: str) -> RunFolder:
    """Return a run of ten steps, MXNorm p=2 in MXFP8, to be read and not to be written to."""
    folder, arm = tmp_path_factory.mktemp("trained"), ("norm=mxnorm_p2", "precision=mxfp8")
    run_here(folder, "+experiment=quickstart", *arm, "+debug=tiny", "runs_dir=runs", "tracking=none", cache)
    (found,) = find_runs(folder / "runs")
    return found


@pytest.fixture(scope="session")
def evaluation_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="session")
def students(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a stack of two students after twelve steps, to be read and not to be written to."""
    folder = tmp_path_factory.mktemp("students")
    run_here(folder, "+experiment=student_teacher", "+debug=tiny", "runs_dir=runs", "tracking=none")
    (found,) = find_runs(folder / "runs")
    return found


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database to copy: making one takes two seconds, and copying none."""
    from mxstudy.tracking.mlflow_store import create_store  # imports MLflow

    path, said = tmp_path_factory.mktemp("store") / "new" / "mlflow.db", io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        assert create_store(f"sqlite:///{path}") is None
    assert said.getvalue() == ""
    return path


@pytest.fixture
def uri(tmp_path: Path, empty_store: Path) -> str:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(scope="session")
def given_to(
    trained: RunFolder, students: RunFolder, evaluation_sets: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[str]]:
    """Return the overrides that an experiment or sweep needs and does not set.

    They name a checkpoint, questions, a parent or a text.
    """
    checkpoint = f"checkpoint={trained.path}"
    data = f"evaluation.data_dir={evaluation_sets}"
    given = {
        "olmes": [checkpoint, data],
        "nvidia_reasoning": [checkpoint, data],
        "perplexity": [checkpoint],
        "shakespeare": [book(tmp_path_factory.mktemp("book"), characters=1_200_000)],
        "generate": [checkpoint, "prompt=text"],
        "interventions": [f"parent={students.path}", "at_step=9"],
        "interventions_public_code": [f"parent={students.path}", "at_step=9"],
    }
    return lambda name: given.get(name, [])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_collection_finish() -> None:
    forked.leave_imports_alone()
