"""submitit: a job array, and Slurm's reason if it refuses one. Checked with submitit 1.5.4."""

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
    """Submit one array element for each callable of `work`, and return job id and log path of each, in order.

    `folder` holds the array's files. The lines of `teardown` in `parameters` run right after srun, so that $? is srun's
    exit code. Raises ConfigError with Slurm's reason if it refuses the array.

    Why here: submitit does not export the exceptions that a refused submission raises, and it does not document that
    nothing runs between srun and the teardown.
    """
    try:
        executor = submitit.SlurmExecutor(folder=folder)
        executor.update_parameters(**parameters)
        with executor.batch():
            jobs = [executor.submit(each) for each in work]
    except (RuntimeError, OSError, FailedJobError, FailedSubmissionError) as error:
        raise ConfigError(f"hydra/launcher=slurm: {str(error) or type(error).__name__}") from error
    return [(job.job_id, str(job.paths.stdout)) for job in jobs]
