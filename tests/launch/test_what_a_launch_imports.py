"""A launch does not import what costs seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAINS_OR_REPORTS = {
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.checkpoint", "torchao"),
    *("datasets", "lm_eval", "matplotlib", "mlflow", "pandas", "scipy", "transformers", "mxstudy.studies.pretrain.run"),
}


def imported_by(program: str) -> set[str]:
    program += "\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_command_line_is_there_before_torch_is() -> None:
    modules = imported_by("import mxstudy.cli.main")
    assert "mxstudy.launch.process_pool" in modules
    assert "torch" not in modules


@pytest.mark.integration
def test_planning_imports_nothing_that_trains(tmp_path: Path) -> None:
    modules = imported_by(f"""if True:
        import sys; sys.path.append({str(Path(__file__).parent)!r})
        from pathlib import Path
        from fake_study import composed
        from mxstudy.launch import start
        one = composed(Path({str(tmp_path)!r}))
        one.values["model"]["vocab_size"] = 257
        (job,) = start.plan([one])
        assert job.state == "new" """)
    assert {"torch", "mxstudy.studies.pretrain.study"} <= modules
    assert not TRAINS_OR_REPORTS & modules
