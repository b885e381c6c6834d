"""+launch=status, cancel, retry: what can be done about jobs that were launched, from the run folders alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mxstudy.config import Local, Slurm, read_launcher
from mxstudy.launch import queues, remote
from mxstudy.launch.freeze import one_at_a_time
from mxstudy.launch.plan import Job
from mxstudy.launch.processes import gpus_per_node
from mxstudy.launch.queues import Queues
from mxstudy.launch.run_state import DONE, RunState, look, observe
from mxstudy.launch.select import select
from mxstudy.launch.sweep import say
from mxstudy.launch.table import show, status_table, wait_for
from mxstudy.reader import ConfigError, plain, read, require, suggest
from mxstudy.studies import study_of
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.runtime import planned_for

SETTING = "hydra.launcher."
RETRIED = ("failed", "preempted")


def run(command: str, arguments: Sequence[str]) -> int:
    """`arguments` of the command line: which runs, and of retry what is to be different. Returns the exit code.

    Raises ConfigError.
    """
    if command not in COMMANDS:
        raise ConfigError(f"launch={command}: no such choice; {suggest(command, COMMANDS)}")
    settings = [a for a in arguments if a.lstrip("+").startswith(SETTING)]
    named = dict(a.split("=", 1) for a in arguments if a.startswith(("runs_dir=", "wait=")))
    if command != "retry":
        require(not [*settings, *named.keys() & {"wait"}], f"launch={command}: takes no hydra.launcher, and no wait")
    which = [a for a in arguments if a not in settings and a.partition("=")[0] not in named]
    runs_dir = Path(named.get("runs_dir", "runs"))
    folders = select(which, runs_dir)
    wait: bool = read(bool, yaml.safe_load(named.get("wait", "false")), "wait")
    return COMMANDS[command](folders, runs_dir, changes_of(settings), wait)


def status(folders: Sequence[RunFolder], runs_dir: Path, changes: Mapping[str, Any], wait: bool) -> int:
    queues_now = Queues()
    say("\n".join(status_table(look(folder, queues_now) for folder in folders)))
    return 0


def cancel(folders: Sequence[RunFolder], runs_dir: Path, changes: Mapping[str, Any], wait: bool) -> int:
    """What is queued or runs ends, with a checkpoint where Slurm or the queue leaves it the time for one."""
    with one_at_a_time(runs_dir):
        flying = [seen for seen in observed(folders) if seen.in_flight]
        tickets = [seen.ticket for seen in flying if seen.ticket]
        for seen in flying:
            if seen.ticket:
                replace(seen.ticket, cancelled=True).write(seen.folder)
                if seen.waits:
                    seen.folder.update(state="cancelled")
        queues.cancel(tickets)
    for seen in flying:
        by_hand = f"not cancelled: process {seen.status.pid} on {seen.status.host} runs it; stop it there"
        say(f"{f'cancelled: job {seen.ticket.job_id}' if seen.ticket else by_hand}  {seen.folder.path}")
    say(f"{len(tickets)} of {len(folders)} runs cancelled")
    return int(len(tickets) < len(flying))


def retry(folders: Sequence[RunFolder], runs_dir: Path, changes: Mapping[str, Any], wait: bool) -> int:
    """What failed or was preempted, and waits in no queue, goes back into the one that it was in, with today's code."""
    with one_at_a_time(runs_dir):
        again = [seen for seen in observed(folders) if seen.state in RETRIED and not seen.in_flight]
        groups: dict[tuple[Local | Slurm, str], list[RunFolder]] = defaultdict(list)
        for seen in again:
            if seen.ticket:
                groups[changed(seen.ticket.settings, changes), seen.ticket.cwd].append(seen.folder)
            else:
                never = (seen.status.reason or "").startswith(remote.NOT_SUBMITTED)
                how = "was never submitted" if never else "ran inline"
                say(f"left alone: {seen.folder.path} {how}; its command, run again, goes on with it")
        jobs = {place: jobs_of(own, *place) for place, own in groups.items()}  # all are known before one is submitted
        for (settings, cwd), own_jobs in jobs.items():
            with chdir(cwd):
                remote.submit(own_jobs, settings)
    retried = [RunFolder(job.folder) for own_jobs in jobs.values() for job in own_jobs]
    if retried:
        show(retried)
    why = "" if retried else "; only what failed or was preempted, and waits in no queue, is"
    say(f"{len(retried)} of {len(folders)} runs submitted again{why}")
    return int(any(seen.state not in DONE for seen in wait_for(retried))) if wait and retried else 0


Command = Callable[[Sequence[RunFolder], Path, Mapping[str, Any], bool], int]
COMMANDS: dict[str, Command] = {"status": status, "cancel": cancel, "retry": retry}


def observed(folders: Iterable[RunFolder]) -> list[RunState]:
    now = Queues()
    return [observe(folder, now) for folder in folders]


def changes_of(settings: Sequence[str]) -> dict[str, Any]:
    """hydra.launcher.KEY=VALUE, VALUE in YAML."""
    pairs = (setting.lstrip("+").removeprefix(SETTING).partition("=") for setting in settings)
    return {key: yaml.safe_load(value) for key, _, value in pairs}


def changed(settings: Local | Slurm, changes: Mapping[str, Any]) -> Local | Slurm:
    now = read_launcher(plain(settings) | dict(changes))
    assert isinstance(now, Local | Slurm)
    return now


def jobs_of(folders: Sequence[RunFolder], settings: Local | Slurm, cwd: str) -> list[Job]:
    """As they will be where they run, from where they were submitted."""
    absolute = [RunFolder(folder.path.absolute()) for folder in folders]
    with planned_for(gpus_per_node(settings)), chdir(cwd):
        return [job_of(folder) for folder in absolute]


def job_of(folder: RunFolder) -> Job:
    """The job that the run was, from its folder. Raises ConfigError where today's code cannot run it."""
    config: Any = folder.config()
    study = study_of(config.study)
    study.check(config)
    asked, known = folder.provenance(), folder.status()
    return Job(
        config,
        known.fingerprint,
        folder.path,
        label=asked["label"],
        overrides=tuple(asked["overrides"]),
        choices=asked["choices"],
        state="resume",
        parent_id=known.mlflow_parent_id,
        backend=study.backends(config),
    )
