"""submitit: a job array, and what Slurm says against it. Checked with submitit 1.5.4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from mxstudy.reader import ConfigError


def submit_array(
    folder: Path, parameters: Mapping[str, Any], work: Sequence[Callable[[], None]]
) -> list[tuple[str, str]]:
    """Return job id and log of each element of an array, which calls what stands at its place in `work`.

    `folder` holds the array's files. The lines of `teardown` in `parameters` begin right after srun, so that $? is what
    srun left. Raises ConfigError with what Slurm says against it.

    Why it is here: what a refused submission raises is not exported by submitit, and that nothing comes between srun
    and the teardown is written nowhere.
    """
    try:
        executor = submitit.SlurmExecutor(folder=folder)
        executor.update_parameters(**parameters)
        with executor.batch():
            jobs = [executor.submit(each) for each in work]
    except (RuntimeError, OSError, FailedJobError, FailedSubmissionError) as error:
        raise ConfigError(f"hydra/launcher=slurm: {str(error) or type(error).__name__}") from error
    return [(job.job_id, str(job.paths.stdout)) for job in jobs]
