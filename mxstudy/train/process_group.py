"""Find this process's rank in the variables of torchrun, submitit or Slurm, and form the process group."""

from __future__ import annotations

import os
import re
import socket
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

MOST_RANKS = 2**20
TIMEOUT = timedelta(minutes=30)  # of a collective; the watch notices a dead rank long before
LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_000)  # below the ports that Linux assigns by itself


@dataclass(frozen=True)
class ProcessRank:
    """A process's rank, also within its node; `address`, `port`: where rank 0 listens ('' and 0 if it is alone)."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0


class Starter(NamedTuple):
    """The environment variables in which a starter tells a process its rank.

    `here`: the address of all its processes, if they are always on this machine. `local_size`: how many of them are.
    """

    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    job: str = ""
    nodes: str = ""
    here: str = ""


STARTERS = {
    "torchrun": Starter("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "submitit": Starter(
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        "SUBMITIT_LOCAL_LOCALID",
        job="SUBMITIT_LOCAL_JOB_ID",
        here=LOOPBACK,
    ),
    "srun": Starter(  # the step's size, because a batch script, which is one process, has SLURM_NTASKS too
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", job="SLURM_JOB_ID", nodes="SLURM_STEP_NODELIST"
    ),
}


def find_rank(environment: Mapping[str, str]) -> ProcessRank:
    """Return this process's rank among those started with it; without any starter's variables it is alone.

    Raises ConfigError if several processes were started and rank 0's address is unknown.
    """
    for name, starter in STARTERS.items():
        if starter.rank in environment and starter.size in environment:
            size = number_in(environment, starter.size, range(1, MOST_RANKS))
            if size == 1:
                return ProcessRank()
            rank, local_rank = (number_in(environment, key, range(size)) for key in (starter.rank, starter.local_rank))
            return ProcessRank(rank, size, local_rank, *meeting_point(environment, name))
    return ProcessRank()


def number_in(environment: Mapping[str, str], variable: str, allowed: range) -> int:
    """Return the number in an environment variable. Raises ConfigError unless it is an allowed one."""
    text = environment.get(variable, "0")
    require(
        text.isdecimal() and int(text) in allowed,
        f"{variable}: must lie in {allowed.start} .. {allowed.stop - 1}, not {text!r}; torchrun, srun and submitit set "
        "it, and a process that is alone needs none",
    )
    return int(text)


def meeting_point(environment: Mapping[str, str], name: str) -> tuple[str, int]:
    """Return rank 0's address and port: MASTER_ADDR and MASTER_PORT, else the first node and a port by the job's id."""
    starter = STARTERS[name]
    job = environment.get(starter.job, "")
    address = environment.get("MASTER_ADDR") or first_node(environment.get(starter.nodes, starter.here))
    all_here = starter.local_size in environment and environment[starter.local_size] == environment[starter.size]
    if address and (all_here or address == "localhost" or environment.get(starter.nodes) == address):  # the only node
        address = LOOPBACK
    port = environment.get("MASTER_PORT") or (PORTS[int(job) % len(PORTS)] if job.isdigit() else 0)
    require(
        bool(address and port),
        f"MASTER_ADDR, MASTER_PORT: not set, but the variables of {name} say that there are several processes; start "
        "them with torchrun, srun or submitit, or set both",
    )
    return address, number_in({"MASTER_PORT": str(port)}, "MASTER_PORT", range(1, 2**16))


def first_node(nodes: str) -> str:
    """Return the first node of Slurm's list, e.g. 'gpu-003' of 'gpu-[003-007,12],login'."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])


@contextmanager
def met() -> Iterator[None]:
    """Form a process group of the processes that were started together, within the block, unless there is one."""
    process = find_rank(os.environ)
    if process.size == 1 or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if process.address == LOOPBACK:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if process.address == LOOPBACK and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = loopback_store(process)
        dist.init_process_group(backend, None, TIMEOUT, process.size, process.rank, store)
    else:
        meet = f"tcp://{process.address}:{process.port}"
        dist.init_process_group(backend, meet, TIMEOUT, process.size, process.rank)
    yield
    dist.destroy_process_group()


def loopback_store(process: ProcessRank) -> dist.Store:
    """Return the store of a process group of one host: rank 0 serves it to this machine only, not to the network."""
    if process.rank > 0:
        return dist.TCPStore(LOOPBACK, process.port, process.size, is_master=False, timeout=TIMEOUT)
    server = socket.create_server((LOOPBACK, process.port), backlog=socket.SOMAXCONN)
    listening = server.detach()  # the store closes it
    return dist.TCPStore(
        LOOPBACK, process.port, process.size, is_master=True, timeout=TIMEOUT, master_listen_fd=listening
    )


@contextmanager
def process_group(device: torch.device, folder: RunFolder) -> Iterator[None]:
    """Let the processes that were started together train the folder's run within the block, each on its own GPU.

    An exception in one process ends all: that process raises it, the others leave with SystemExit. If a process dies
    without an error, or stops for half a minute, the others notice and record it in the run's status.
    """
    process = find_rank(os.environ)
    if process.size == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(gpu_of(process, torch.cuda.device_count()))
    with met(), Watch(process.rank, process.size, lambda: second_store(process), folder):
        yield
        dist.barrier()


def second_store(process: ProcessRank) -> dist.Store:
    """Return another connection to the group's store: a call that waits on one connection blocks all its users."""
    return dist.TCPStore(process.address, process.port, is_master=False, timeout=timedelta(seconds=20))


def gpu_of(process: ProcessRank, gpus: int) -> int:
    """Return the index of the process's GPU, whether Slurm shows a task all GPUs of the node or only its own.

    Raises ConfigError for a process without a GPU.
    """
    require(
        gpus == 1 or process.local_rank < gpus,
        f"rank {process.rank}: it is process {process.local_rank + 1} of its node, which has {gpus} GPUs; start one "
        "process per GPU",
    )
    return 0 if gpus == 1 else process.local_rank
