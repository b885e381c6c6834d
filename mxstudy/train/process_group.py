"""Which of how many processes this one is, as torchrun, submitit or Slurm say it; and the group they form."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from mxstudy.reader import require
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.watch import Watch

TIMEOUT = timedelta(minutes=30)  # of a collective; a rank that dies is noticed by the watch, long before
PORTS = range(20_000, 32_000)  # below those that Linux gives away by itself


@dataclass(frozen=True)
class ProcessRank:
    """`local_rank`: within the node. `address`, `port`: where rank 0 listens; '' and 0 where there is but one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0


class Starter(NamedTuple):
    """The variables in which one says what a process is; `here`: where all are that it starts, if that is sure."""

    rank: str
    size: str
    local_rank: str
    job: str = ""
    nodes: str = ""
    here: str = ""


STARTERS = {
    "torchrun": Starter("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "submitit": Starter(
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        "SUBMITIT_LOCAL_LOCALID",
        job="SUBMITIT_LOCAL_JOB_ID",
        here="127.0.0.1",
    ),
    "srun": Starter(  # of the step: a batch script, which is one process, has SLURM_NTASKS too
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", job="SLURM_JOB_ID", nodes="SLURM_STEP_NODELIST"
    ),
}


def find_rank(environment: Mapping[str, str]) -> ProcessRank:
    """Of this process among those that were started with it; the only one where nothing says otherwise.

    Raises ConfigError where more than one was started, and nothing says where they meet.
    """
    for name, starter in STARTERS.items():
        if starter.rank in environment and starter.size in environment:
            rank, size, local_rank = (int(environment.get(variable, "0")) for variable in starter[:3])
            return ProcessRank(rank, size, local_rank, *meeting_point(environment, name)) if size > 1 else ProcessRank()
    return ProcessRank()


def meeting_point(environment: Mapping[str, str], name: str) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT; without them the first node, and a port that follows from the job's id."""
    starter = STARTERS[name]
    job = environment.get(starter.job, "")
    address = environment.get("MASTER_ADDR") or first_node(environment.get(starter.nodes, starter.here))
    port = environment.get("MASTER_PORT") or (PORTS[int(job) % len(PORTS)] if job.isdigit() else 0)
    require(
        bool(address and port),
        f"MASTER_ADDR, MASTER_PORT: not set, and the variables of {name} say that there are several processes; start "
        "them with torchrun, srun or submitit, or set both",
    )
    return address, int(port)


def first_node(nodes: str) -> str:
    """Of Slurm's list: 'gpu-[003-007,12],login' is 'gpu-003'."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])


@contextmanager
def met() -> Iterator[None]:
    """Within the block, or the one around it, the processes that were started together are one group."""
    place = find_rank(os.environ)
    if place.size == 1 or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    meet = f"tcp://{place.address}:{place.port}"
    dist.init_process_group(backend, meet, TIMEOUT, world_size=place.size, rank=place.rank)
    yield
    dist.destroy_process_group()


@contextmanager
def process_group(device: torch.device, folder: RunFolder) -> Iterator[None]:
    """Within the block the processes that were started together train the run of that folder, each on its own GPU.

    What one of them raises ends all of them: that one goes on raising it, the others leave with SystemExit. One that
    dies without a word, or does not move for half a minute, is noticed by the others, who say so in the run's status.
    """
    place = find_rank(os.environ)
    if place.size == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(gpu_of(place, torch.cuda.device_count()))
    with met(), Watch(place.rank, place.size, lambda: second_store(place), folder):
        yield
        dist.barrier()


def second_store(place: ProcessRank) -> dist.Store:
    """Another connection to the group's store: what waits on one blocks who else would use it."""
    return dist.TCPStore(place.address, place.port, is_master=False, timeout=timedelta(seconds=20))


def gpu_of(place: ProcessRank, gpus: int) -> int:
    """Slurm may show every task all GPUs of the node, or its own alone. Raises ConfigError for a task without one."""
    require(
        gpus == 1 or place.local_rank < gpus,
        f"rank {place.rank}: it is process {place.local_rank + 1} of its node, which has {gpus} GPUs; one each, please",
    )
    return 0 if gpus == 1 else place.local_rank
