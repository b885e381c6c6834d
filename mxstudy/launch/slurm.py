"""Runs to Slurm, through submitit: an array, whose elements each call `Work` on a folder."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mxstudy.compat.submitit import submit_array
from mxstudy.config.launcher import Slurm
from mxstudy.launch.freeze import environment_of
from mxstudy.launch.queues import PREEMPTED
from mxstudy.launch.worker import Work
from mxstudy.tracking.folder import RunFolder

# After srun: a signal that comes before Python has a handler for it kills the task, and the job takes its next turn as
# `worker.requeue` would.
LAST_LINES = f"""\
code=$?
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
case $code in
  {128 + signal.SIGUSR2}) scontrol requeue $job;;
  {128 + signal.SIGTERM}) scontrol show job $job | grep -q {PREEMPTED} && scontrol requeue $job;;
esac
exit $code"""
# sbatch hands on what the shell has; a torchrun around that one says nothing of the job's tasks.
FIRST_LINE = "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT"
MOST_IN_AN_ARRAY = 1000  # Slurm's own limit, MaxArraySize, is 1001 where nobody has changed it


def submit(
    folders: Sequence[RunFolder], settings: Slurm, launch: Path, code: Path, tasks: int
) -> Iterator[tuple[str, str]]:
    """Yield job id and log of each, in order. Raises ConfigError with what Slurm says against it.

    `tasks`: on each node. A launch's folder holds all of its jobs: Slurm could not open a log in a folder that is yet
    to be named after a job.
    """
    for start in range(0, len(folders), MOST_IN_AN_ARRAY):
        work = [Work(str(folder.path.absolute())) for folder in folders[start : start + MOST_IN_AN_ARRAY]]
        yield from submit_array(launch, parameters(settings, code, tasks), work)


def parameters(settings: Slurm, code: Path, tasks: int) -> dict[str, Any]:
    """Return the settings in submitit's words; what is null is left to the cluster."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment_of(code).items()]
    # the tasks that one leaves behind have two minutes to notice; since 22.05 srun does not pass on CPUs by itself
    srun_args = ["--wait=120", "--open-mode=append"]
    if settings.cpus_per_task:
        srun_args.append(f"--cpus-per-task={settings.cpus_per_task}")
    asked = {
        "job_name": "mxstudy",
        "partition": settings.partition,
        "account": settings.account,
        "nodes": settings.nodes,
        "ntasks_per_node": tasks,
        "gpus_per_node": settings.gpus_per_node or None,
        "cpus_per_task": settings.cpus_per_task,
        "mem": f"{round(settings.memory_gb * 1024)}MB" if settings.memory_gb else None,
        "time": settings.time_min,
        "array_parallelism": settings.array_parallelism,
        "signal_delay_s": settings.signal_delay_s,
        "stderr_to_stdout": True,
        "srun_args": srun_args,
        "setup": [FIRST_LINE, *settings.setup, *exports],
        "teardown": LAST_LINES.splitlines(),
        "additional_parameters": {"requeue": True} | settings.sbatch_options,
    }
    return {name: value for name, value in asked.items() if value is not None}
