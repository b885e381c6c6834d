"""submitit does what mxstudy.compat.submitit relies on, with an sbatch of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
import submitit
from submitit.core import utils
from submitit.slurm.slurm import _make_sbatch_string

from mxstudy.compat.submitit import submit_array
from mxstudy.reader import ConfigError


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put an sbatch and an srun on the PATH, and return the folder whose file `says` tells sbatch what to answer."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "srun"):
        (folder / name).write_text(f"#!/bin/sh\n. {folder}/says\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def nothing() -> None:
    """Do nothing, as a job."""


def test_an_array_has_a_job_id_and_a_log_for_each(sbatch: Path, tmp_path: Path) -> None:
    (sbatch / "says").write_text("echo Submitted batch job 17\n")
    jobs = submit_array(tmp_path / "launch", {"time": 5, "stderr_to_stdout": True}, [nothing, nothing])
    assert [job for job, _ in jobs] == ["17_0", "17_1"]
    assert [Path(log).name for _, log in jobs] == ["17_0_0_log.out", "17_1_0_log.out"]


def test_what_slurm_refuses_is_said_in_its_words(sbatch: Path, tmp_path: Path) -> None:
    (sbatch / "says").write_text("echo sbatch: error: invalid partition specified: gpus >&2; exit 1\n")
    with pytest.raises(ConfigError, match=r"(?s)^hydra/launcher=slurm: .*invalid partition specified: gpus"):
        submit_array(tmp_path / "launch", {"time": 5}, [nothing, nothing])


def test_what_a_refusal_raises_is_where_it_was() -> None:
    assert issubclass(utils.FailedSubmissionError, Exception)
    assert issubclass(utils.FailedJobError, Exception)
    assert not hasattr(submitit, "FailedSubmissionError"), "exported now: compat/submitit.py may take it from there"


def test_the_teardown_begins_right_after_srun() -> None:
    text = _make_sbatch_string(command="COMMAND", folder="/logs", setup=["first"], teardown=["code=$?", "exit $code"])
    code = [line for line in text.splitlines() if line and not line.startswith("#")]
    srun = next(number for number, line in enumerate(code) if line.startswith("srun "))
    assert code[srun].endswith(" COMMAND")
    assert code[srun + 1 :] == ["code=$?", "exit $code"]
    assert code.index("first") < srun
