from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import PATH, Cluster, missing


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Run four nodes for as long as the tests last. A cluster that could not be started keeps its folder."""
    if lacking := missing():
        pytest.skip(f"no Slurm here ({lacking[0]}): apt-get install --no-install-recommends slurm-wlm munge")
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder) / "cluster")
        Path(folder).chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(made.conf))
            patch.setenv("PATH", PATH)
            try:
                made.start()
                yield made
            finally:
                made.stop()


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give jobs one thread each, as in the tests' own process, because sums in another order have other bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "SLURM_JOB_ID" not in os.environ
