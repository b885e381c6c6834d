"""The number of processes, GPUs and nodes that a kind of run can use, whether a launcher or a user starts it."""

from __future__ import annotations

from collections.abc import Sequence

from mxstudy.config import AnyRun
from mxstudy.config.launcher import Inline, Launcher, Local, Slurm
from mxstudy.distributed import world_size
from mxstudy.launch import local
from mxstudy.launch.job import Job
from mxstudy.reader import require
from mxstudy.studies import study_of
from mxstudy.studies.protocol import Uses


def gpus_per_node(settings: Launcher) -> int | None:
    """Return the GPUs per node of each job, or None for a job that runs in this process. Raises ConfigError."""
    if isinstance(settings, Inline):
        return None
    return local.share(settings)[0] if isinstance(settings, Local) else settings.gpus_per_node


def tasks_per_node(study: str, settings: Local | Slurm) -> int:
    """Return the processes per node of a job. Raises ConfigError if its kind of run cannot use the settings."""
    uses, gpus, nodes = study_of(study).uses, settings.gpus_per_node or 0, settings.nodes
    require(
        uses == Uses.TASK_EACH or nodes == 1, f"hydra.launcher.nodes: {study} runs in one process; give 1, not {nodes}"
    )
    require(
        uses != Uses.ONE_GPU or gpus <= 1,
        f"hydra.launcher.gpus_per_node: {study} uses one GPU; give 1, not {gpus}",
    )
    return max(1, gpus) if uses == Uses.TASK_EACH else 1


def check_asked(jobs: Sequence[Job], settings: Local | Slurm) -> None:
    """Raise ConfigError if the processes that a run's launcher will start cannot share the run."""
    ranks = world_size()
    require(
        ranks == 1,
        f"hydra/launcher: local and slurm start processes themselves, but {ranks} were started together; start it "
        "without torchrun or srun",
    )
    for job in jobs:
        check(job.config, tasks_per_node(job.config.study, settings) * settings.nodes)


def check_started(jobs: Sequence[Job]) -> None:
    """Raise ConfigError if the processes that torchrun or srun has started cannot share the run."""
    ranks = world_size()
    for job in jobs:
        study = job.config.study
        require(
            ranks == 1 or study_of(study).uses == Uses.TASK_EACH,
            f"study: {study} runs in one process, but {ranks} were started together; start it without torchrun or srun",
        )
        check(job.config, ranks)


def check(config: AnyRun, ranks: int) -> None:
    """Raise ConfigError if several ranks cannot share a run with this config."""
    if ranks > 1:
        study_of(config.study).check(config, ranks)
