"""Which of how many processes this one is, as torchrun, submitit or Slurm say it; and the group they form."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from mxstudy.reader import ConfigError, require
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.watch import Watch

TIMEOUT = timedelta(minutes=30)  # of a collective; a rank that dies is noticed by the watch, long before
PORTS = range(20_000, 32_000)  # below those that Linux gives away by itself


@dataclass(frozen=True)
class Place:
    """`local_rank`: within the node. `address`, `port`: where rank 0 listens; '' and 0 where there is but one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0


# Variables of whoever started this process: its rank, how many there are, its rank within the node.
STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "submitit, on this machine": ("SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_LOCALID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # of the step: a batch script has NTASKS too
}


def find_place(environment: Mapping[str, str]) -> Place:
    """Of this process among those that were started with it; the only one where nothing says otherwise.

    Raises ConfigError where more than one was started, and nothing says where they meet.
    """
    for starter, names in STARTERS.items():
        if all(name in environment for name in names[:2]):
            rank, size, local_rank = (int(environment.get(name, "0")) for name in names)
            if size > 1:
                return Place(rank, size, local_rank, *meeting_point(environment, starter))
    return Place()


def meeting_point(environment: Mapping[str, str], starter: str) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT; without them the step's first node, and a port that follows from the job's id."""
    job = next((environment[name] for name in ("SUBMITIT_LOCAL_JOB_ID", "SLURM_JOB_ID") if name in environment), None)
    nodes = environment.get("SLURM_STEP_NODELIST")
    found = (
        first_node(nodes) if nodes and starter == "srun" else "127.0.0.1" if starter.startswith("submitit") else None
    )
    address = environment.get("MASTER_ADDR", found)
    port = environment.get("MASTER_PORT", PORTS[int(job) % len(PORTS)] if job and job.isdigit() else None)
    if address is None or port is None:
        raise ConfigError(
            f"MASTER_ADDR, MASTER_PORT: not set, and {starter} says that there are several processes; start them with "
            "torchrun, srun or submitit, or set both"
        )
    return address, int(port)


def first_node(nodes: str) -> str:
    """Of Slurm's list: 'gpu-[003-007,12],login' is 'gpu-003'."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])


@contextmanager
def joined(device: torch.device, folder: RunFolder) -> Iterator[None]:
    """Within the block the processes that were started together are one group, each on a GPU of its own.

    What one of them raises ends all of them: that one goes on raising it, the others leave with SystemExit. One that
    dies without a word, or does not move for half a minute, is noticed by the others, who say so in the run's status.
    """
    place = find_place(os.environ)
    if place.size == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(gpu_of(place, torch.cuda.device_count()))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    meet = f"tcp://{place.address}:{place.port}"
    dist.init_process_group(backend, meet, TIMEOUT, world_size=place.size, rank=place.rank)
    with Watch(place.rank, place.size, lambda: second_store(place), folder):
        yield
        dist.barrier()
    dist.destroy_process_group()


def second_store(place: Place) -> dist.Store:
    """Another connection to the group's store: what waits on one blocks who else would use it."""
    return dist.TCPStore(place.address, place.port, is_master=False, timeout=timedelta(seconds=20))


def gpu_of(place: Place, gpus: int) -> int:
    """Slurm may show every task all GPUs of the node, or its own alone. Raises ConfigError for a task without one."""
    require(
        gpus == 1 or place.local_rank < gpus,
        f"rank {place.rank}: it is process {place.local_rank + 1} of its node, which has {gpus} GPUs; one each, please",
    )
    return 0 if gpus == 1 else place.local_rank
