import os

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
import torch
from commands import run_here
from quiz import write_sets

from mxstudy.tracking.folder import RunFolder, find_runs

torch.set_num_threads(1)  # the models of the tests are too small for two


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of ten steps, MXNorm p=2 in MXFP8, to be read and not to be written to."""
    folder = tmp_path_factory.mktemp("trained")
    run_here(folder, "+experiment=quickstart", "norm=mxnorm_p2", "precision=mxfp8", "+debug=tiny", "tracking=none")
    (found,) = find_runs(folder / "runs")
    return found


@pytest.fixture(scope="session")
def evaluation_sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sets(tmp_path_factory.mktemp("sets"))
