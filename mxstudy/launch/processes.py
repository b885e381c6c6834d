"""How many processes, GPUs and nodes a kind of run can use: those that a launcher starts, or were started by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mxstudy.config.launcher import Inline, Launcher, Local, Slurm
from mxstudy.distributed import world_size
from mxstudy.launch import local
from mxstudy.launch.plan import Job
from mxstudy.reader import require
from mxstudy.studies import study_of
from mxstudy.studies.protocol import Uses


def gpus_per_node(settings: Launcher) -> int | None:
    """Of each job; None: it runs in this process, with what this machine has. Raises ConfigError."""
    if isinstance(settings, Inline):
        return None
    return local.share(settings)[0] if isinstance(settings, Local) else settings.gpus_per_node


def tasks_per_node(study: str, settings: Local | Slurm) -> int:
    """Raises ConfigError where that kind of run cannot use what was asked for."""
    uses, gpus, nodes = study_of(study).uses, settings.gpus_per_node or 0, getattr(settings, "nodes", 1)
    require(uses == Uses.TASK_EACH or nodes == 1, f"hydra.launcher.nodes: {study} is one process, not {nodes}; give 1")
    require(
        uses != Uses.ONE_GPU or gpus <= 1,
        f"hydra.launcher.gpus_per_node: {study} has use for one GPU, not {gpus}; give 1",
    )
    return max(1, gpus) if uses == Uses.TASK_EACH else 1


def check_asked(jobs: Sequence[Job], settings: Local | Slurm) -> None:
    """Raises ConfigError for a run that cannot be shared by the processes that its launcher will start."""
    ranks = world_size()
    require(
        ranks == 1,
        f"hydra/launcher: local and slurm start processes themselves, and {ranks} were started together; start it "
        "without torchrun or srun",
    )
    for job in jobs:
        check(job.config, tasks_per_node(job.config.study, settings) * getattr(settings, "nodes", 1))


def check_started(jobs: Sequence[Job]) -> None:
    """Raises ConfigError for a run that cannot be shared by the processes that torchrun, say, has started."""
    ranks = world_size()
    for job in jobs:
        study = job.config.study
        require(
            ranks == 1 or study_of(study).uses == Uses.TASK_EACH,
            f"study: {study} is one process, and {ranks} were started together; start it without torchrun or srun",
        )
        check(job.config, ranks)


def check(config: Any, ranks: int) -> None:
    """Only some kinds of run can be shared at all."""
    if ranks > 1:
        study_of(config.study).check(config, ranks)
