"""The Slurm launcher: submit runs through submitit, as an array whose elements each call `Work` on a run folder."""

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

# Run after srun. A signal that arrives before Python has installed its handler kills the task; the job is then requeued
# as `worker.requeue` would do it.
LAST_LINES = f"""\
code=$?
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
case $code in
  {128 + signal.SIGUSR2}) scontrol requeue $job;;
  {128 + signal.SIGTERM}) scontrol show job $job | grep -q {PREEMPTED} && scontrol requeue $job;;
esac
exit $code"""
# sbatch passes the shell's environment on; the variables of a torchrun around it do not describe the job's tasks.
FIRST_LINE = "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT"
MOST_IN_AN_ARRAY = 1000  # Slurm's default limit, MaxArraySize, is 1001


def submit(
    folders: Sequence[RunFolder], settings: Slurm, launch: Path, code: Path, tasks: int
) -> Iterator[tuple[str, str]]:
    """Submit the runs, and yield job id and log path of each, in order. Raises ConfigError with Slurm's reason.

    `tasks`: tasks per node. All logs go to the launch's folder, because Slurm cannot open a log in a folder that is
    named after the job id.
    """
    for start in range(0, len(folders), MOST_IN_AN_ARRAY):
        work = [Work(str(folder.path.absolute())) for folder in folders[start : start + MOST_IN_AN_ARRAY]]
        yield from submit_array(launch, parameters(settings, code, tasks), work)


def parameters(settings: Slurm, code: Path, tasks: int) -> dict[str, Any]:
    """Return the settings under submitit's names, without those that are null, which the cluster decides."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment_of(code).items()]
    # after one task ends, the others have two minutes to leave; since 22.05 srun does not inherit cpus-per-task
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
