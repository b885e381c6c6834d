"""Runs to processes on this machine: a queue of their own, which outlives the command that started it.

launch/jobs.json   what the queue is to run          queue.json   what it has not ended yet, and queue.lock while
launch/queue.log   what it says                                   it lives: see mxstudy.launch.queues
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from mxstudy.config.launcher import Local
from mxstudy.launch.freeze import environment_of
from mxstudy.launch.queues import QUEUE_LIST, QUEUE_LOCK
from mxstudy.launch.ticket import is_cancelled
from mxstudy.reader import require
from mxstudy.tracking.folder import RunFolder, replace_file

POLL_S = 0.2
KILL_AFTER_S = 60.0  # a job that was asked to leave saves a checkpoint first


@dataclass(frozen=True)
class QueuePlan:
    """jobs.json. `gpus`: of each job; `parallel`: jobs side by side; `tasks`: processes of a job."""

    folders: dict[str, str]  # by job id
    logs: dict[str, str]
    gpus: int
    parallel: int
    tasks: int
    threads: int | None
    setup: list[str]


def submit(
    folders: Sequence[RunFolder], settings: Local, launch: Path, code: Path, tasks: int
) -> Iterator[tuple[str, str]]:
    """Job id and log of each, in order; the queue begins at once. Raises ConfigError for GPUs that are not there."""
    gpus, parallel = share(settings)
    names = [f"{launch.name}/{number}" for number in range(len(folders))]
    logs = [str(launch / f"{number}.log") for number in range(len(folders))]
    paths = [str(folder.path.absolute()) for folder in folders]
    plan = QueuePlan(
        dict(zip(names, paths, strict=True)),
        dict(zip(names, logs, strict=True)),
        gpus,
        parallel,
        tasks,
        settings.cpus_per_task,
        list(settings.setup),
    )
    (launch / "jobs.json").write_text(json.dumps(asdict(plan), indent=1))
    (launch / QUEUE_LIST).write_text(json.dumps(dict.fromkeys(names, "PENDING")))
    lock = (launch / QUEUE_LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # the queue inherits it, so there is no moment without
    with (launch / "queue.log").open("w") as log:
        subprocess.Popen(
            [sys.executable, "-m", "mxstudy.launch", "queue", str(launch)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[lock.fileno()],
            env=os.environ | environment_of(code),
        )
    lock.close()
    yield from zip(names, logs, strict=True)


def share(settings: Local) -> tuple[int, int]:
    """GPUs of a job, and jobs side by side."""
    there = torch.cuda.device_count()
    gpus = min(1, there) if settings.gpus_per_node is None else settings.gpus_per_node
    require(gpus <= there, f"hydra.launcher.gpus_per_node: {gpus} a job, and this machine has {there}")
    parallel = settings.array_parallelism or (there // gpus if gpus else 1)
    require(
        parallel * gpus <= there or not gpus,
        f"hydra.launcher.array_parallelism: {parallel} jobs of {gpus} GPUs, and this machine has {there}",
    )
    return gpus, parallel


@dataclass
class Running:
    """The processes of a job that has begun, and the GPUs that it has."""

    processes: list[subprocess.Popen[bytes]]
    devices: list[str]
    told_s: float | None = None  # when it was asked to leave
    codes: list[int] = field(default_factory=list)

    def has_ended(self) -> bool:
        """When its last process has; where one fails, or somebody wants it, the others are asked to leave."""
        codes = [process.poll() for process in self.processes]
        self.codes = [code for code in codes if code is not None]
        if any(self.codes) and len(self.codes) < len(codes):
            self.leave()
        return len(self.codes) == len(codes)

    def leave(self) -> None:
        now_s = time.monotonic()
        if self.told_s is None:
            self.told_s = now_s
            self._send(signal.SIGTERM)
        elif now_s - self.told_s > KILL_AFTER_S:
            self._send(signal.SIGKILL)

    def _send(self, signum: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signum)


def run_queue(launch: Path) -> None:
    """Starts the jobs in order, so many side by side, and notes what becomes of each."""
    plan = QueuePlan(**json.loads((launch / "jobs.json").read_text()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    free = visible.split(",") if visible else [str(n) for n in range(plan.gpus * plan.parallel)]
    waiting = list(plan.folders)
    running: dict[str, Running] = {}
    while waiting or running:
        while waiting and len(running) < plan.parallel:
            job_id = waiting.pop(0)
            folder = RunFolder(Path(plan.folders[job_id]))
            if is_cancelled(folder):
                folder.update(state="cancelled")
            else:
                devices, free = free[: plan.gpus], free[plan.gpus :]
                running[job_id] = Running(start(plan, job_id, devices), devices)
        for job_id, job in list(running.items()):
            folder = RunFolder(Path(plan.folders[job_id]))
            if is_cancelled(folder):
                job.leave()
            if job.has_ended():
                del running[job_id]
                free = job.devices + free
                mark_failed(folder, job.codes, plan.logs[job_id])
        states = dict.fromkeys(running, "RUNNING") | dict.fromkeys(waiting, "PENDING")
        replace_file(launch / QUEUE_LIST, json.dumps(states))
        time.sleep(POLL_S)


def start(plan: QueuePlan, job_id: str, devices: list[str]) -> list[subprocess.Popen[bytes]]:
    """The processes of a job; of several, each with torchrun's variables."""
    command = f"exec {shlex.join([sys.executable, '-um', 'mxstudy.launch', 'work', plan.folders[job_id]])}"
    shell = ["bash", "-c", "\n".join(["set -e", *plan.setup, command])]
    environment = dict(os.environ)
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)  # of a job without a GPU none
    if plan.threads:
        environment["OMP_NUM_THREADS"] = str(plan.threads)
    port, processes = free_port(), []
    for rank in range(plan.tasks):
        world: dict[str, str] = {}
        if plan.tasks > 1:
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(plan.tasks))
        with open(plan.logs[job_id], "ab") as log:
            processes.append(
                subprocess.Popen(shell, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment | world)
            )
    return processes


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def mark_failed(folder: RunFolder, codes: list[int], log: str) -> None:
    """A job that died without a word gets one; the others have said how they ended."""
    state = folder.status().state
    if state in ("queued", "running") and any(codes):
        code = next(code for code in codes if code)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        folder.update(state="failed", reason=f"died without a word: {how} ({log})")
