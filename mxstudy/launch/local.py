"""The local launcher: run jobs on this machine from a queue process that outlives the command that started it.

launch/jobs.json    the jobs of the queue
launch/queue.log    the output of the queue process
launch/queue.json   the jobs that have not ended yet
launch/queue.lock   locked while the queue process lives: see mxstudy.launch.queues
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from mxstudy.config.launcher import Local
from mxstudy.launch.freeze import environment_of
from mxstudy.launch.queues import QUEUE_LIST, QUEUE_LOCK
from mxstudy.launch.say import say
from mxstudy.launch.threads import threads_of
from mxstudy.launch.ticket import is_cancelled
from mxstudy.reader import ConfigError, one_line, require
from mxstudy.tracking.folder import RunFolder
from mxstudy.whole_files import replace_file

POLL_S = 0.2
KILL_AFTER_S = 60.0  # a job that is asked to stop saves a checkpoint first


@dataclass(frozen=True)
class QueuePlan:
    """The content of jobs.json. `gpus`, `tasks`: GPUs and processes of a job; `parallel`: jobs that run at once.

    `sharing`: jobs that may share a GPU.
    """

    folders: dict[str, str]  # by job id; so are the logs
    logs: dict[str, str]
    gpus: int
    parallel: int
    tasks: int
    threads: int | None
    setup: list[str]
    sharing: int = 1


def submit(
    folders: Sequence[RunFolder], settings: Local, launch: Path, code: Path, tasks: int
) -> Iterator[tuple[str, str]]:
    """Start the queue, and yield job id and log path of each job, in order. Raises ConfigError if GPUs are missing."""
    gpus, parallel = share(settings)
    names = [f"{launch.name}/{number}" for number in range(len(folders))]
    logs = [str(launch / f"{number}.log") for number in range(len(folders))]
    paths = [str(folder.path.absolute()) for folder in folders]
    asked, processes = settings.cpus_per_task, tasks * min(parallel, len(folders))
    threads = None if asked else threads_of(all(folder.is_rehearsal for folder in folders), processes)
    if threads:
        say(threads.line("hydra.launcher.cpus_per_task=N"))
    plan = QueuePlan(
        dict(zip(names, paths, strict=True)),
        dict(zip(names, logs, strict=True)),
        gpus,
        parallel,
        tasks,
        threads.number if threads else asked,
        list(settings.setup),
        settings.jobs_per_gpu,
    )
    replace_file(launch / "jobs.json", json.dumps(asdict(plan), indent=1))
    replace_file(launch / QUEUE_LIST, json.dumps(dict.fromkeys(names, "PENDING")))
    lock = (launch / QUEUE_LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)  # the queue process inherits the lock, so it is never free in between
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
    """Return the number of GPUs of a job and the number of jobs that run at once. Raises ConfigError."""
    available = torch.cuda.device_count()
    gpus = min(1, available) if settings.gpus_per_node is None else settings.gpus_per_node
    require(
        gpus <= available,
        f"hydra.launcher.gpus_per_node: {gpus} GPUs per job, but this machine has {available}; lower it",
    )
    require(
        gpus > 0 or settings.jobs_per_gpu == 1,
        "hydra.launcher.jobs_per_gpu: this machine has no GPU to share; leave it out",
    )
    slots = available * settings.jobs_per_gpu
    parallel = settings.array_parallelism or (slots // gpus if gpus else 1)
    require(
        parallel * gpus <= slots or not gpus,
        f"hydra.launcher.array_parallelism: {parallel} jobs of {gpus} GPUs, but this machine has {available}; lower it"
        + (f", or raise jobs_per_gpu={settings.jobs_per_gpu}" if gpus == 1 else ""),
    )
    return gpus, parallel


@dataclass
class Running:
    """The processes of a job that has started, and its GPUs."""

    processes: list[subprocess.Popen[bytes]]
    devices: list[str]
    asked_s: float | None = None  # when it was asked to stop, by time.monotonic()
    codes: list[int] = field(default_factory=list)

    def poll(self) -> bool:
        """Return whether every process has ended; if one has failed, ask the others to stop."""
        codes = [process.poll() for process in self.processes]
        self.codes = [code for code in codes if code is not None]
        if any(self.codes) and len(self.codes) < len(codes):
            self.leave()
        return len(self.codes) == len(codes)

    def leave(self) -> None:
        """Ask the processes to stop, and kill those that still run after KILL_AFTER_S."""
        now_s = time.monotonic()
        if self.asked_s is None:
            self.asked_s = now_s
            self._send(signal.SIGTERM)
        elif now_s - self.asked_s > KILL_AFTER_S:
            self._send(signal.SIGKILL)

    def _send(self, signum: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signum)


def run_queue(launch: Path) -> None:
    """Start the jobs in order, `parallel` at a time, and record the state of each in QUEUE_LIST.

    A job whose files cannot be read or written disturbs no other.
    """
    plan = QueuePlan(**json.loads((launch / "jobs.json").read_text()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    least = -(-plan.gpus * plan.parallel // plan.sharing)
    free = (visible.split(",") if visible else [str(n) for n in range(least)]) * plan.sharing
    waiting = list(plan.folders)
    running: dict[str, Running] = {}
    said: set[str] = set()
    while waiting or running:
        while waiting and len(running) < plan.parallel:
            job_id = waiting.pop(0)
            folder, devices = RunFolder(Path(plan.folders[job_id])), free[: plan.gpus]
            with errors_said(job_id, said):
                if is_cancelled(folder):
                    folder.update(state="cancelled")
                else:
                    running[job_id] = Running(start(plan, job_id, devices), devices)
                    del free[: plan.gpus]
        for job_id, job in list(running.items()):
            folder = RunFolder(Path(plan.folders[job_id]))
            with errors_said(job_id, said):
                if is_cancelled(folder):
                    job.leave()
            if job.poll():
                del running[job_id]
                free = job.devices + free
                with errors_said(job_id, said):
                    mark_failed(folder, job.codes, plan.logs[job_id])
        states = dict.fromkeys(running, "RUNNING") | dict.fromkeys(waiting, "PENDING")
        with errors_said(QUEUE_LIST, said):
            replace_file(launch / QUEUE_LIST, json.dumps(states))
        time.sleep(POLL_S)


@contextmanager
def errors_said(what: str, said: set[str]) -> Iterator[None]:
    """Print an error of the block, if it is not in `said` yet, and go on behind the block."""
    try:
        yield
    except (ConfigError, OSError) as error:
        line = f"{what}: {one_line(error)}"
        if line not in said:
            said.add(line)
            print(line, flush=True)


def start(plan: QueuePlan, job_id: str, devices: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a job and return them; several get torchrun's variables. On an OSError none is left."""
    command = f"exec {shlex.join([sys.executable, '-um', 'mxstudy.launch', 'work', plan.folders[job_id]])}"
    shell = ["bash", "-c", "\n".join(["set -e", *plan.setup, command])]
    environment = dict(os.environ)
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)  # empty for a job without a GPU
    if plan.threads:
        environment["OMP_NUM_THREADS"] = str(plan.threads)
    port, processes = free_port(), []
    for rank in range(plan.tasks):
        world: dict[str, str] = {}
        if plan.tasks > 1:
            world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            world |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(plan.tasks))
        try:
            with open(plan.logs[job_id], "ab") as log:
                processes.append(
                    subprocess.Popen(shell, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment | world)
                )
        except OSError:
            for process in processes:
                process.kill()  # it would wait for the missing ranks
            raise
    return processes


def free_port() -> int:
    """Return a TCP port of this machine that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def name_of(number: int) -> str:
    """Return a signal's name, or 'signal 40' if it has none."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def mark_failed(folder: RunFolder, codes: list[int], log: str) -> None:
    """Set the state of a job to failed if a process died without recording how the job ended."""
    state = folder.status().state
    if state in ("queued", "running") and any(codes):
        code = next(code for code in codes if code)
        how = name_of(-code) if code < 0 else f"exit code {code}"
        folder.update(state="failed", reason=f"died without a message: {how} ({log})")
