"""+launch=status, cancel and retry: act on jobs that were launched, using only their run folders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mxstudy.config import Local, Slurm, read_launcher
from mxstudy.launch import queues, remote
from mxstudy.launch.freeze import one_at_a_time
from mxstudy.launch.job import Job
from mxstudy.launch.processes import check_asked, gpus_per_node
from mxstudy.launch.queues import Queues
from mxstudy.launch.run_state import RunState, look, observe
from mxstudy.launch.say import say
from mxstudy.launch.select import select
from mxstudy.launch.table import names, show, status_table, wait_for
from mxstudy.reader import ConfigError, one_line, plain, read, require, suggest
from mxstudy.studies import study_of
from mxstudy.tracking.folder import DONE, RunFolder
from mxstudy.train.runtime import planned_for

SETTING = "hydra.launcher."
RETRIED = ("failed", "preempted")


def run(command: str, arguments: Sequence[str]) -> int:
    """Run a command, whose `arguments` select runs and, for retry, change settings. Return the exit code.

    Raises ConfigError.
    """
    if command not in COMMANDS:
        raise ConfigError(f"launch={command}: no such choice; {suggest(command, COMMANDS)}")
    settings = [a for a in arguments if a.lstrip("+").startswith(SETTING)]
    named = dict(a.split("=", 1) for a in arguments if a.startswith(("runs_dir=", "wait=", "setup=")))
    if command != "retry":
        require(
            not [*settings, *named.keys() & {"wait", "setup"}],
            f"launch={command}: takes neither hydra.launcher nor wait nor setup; leave them out",
        )
    consent = named.get("setup")
    require(consent in (None, "run"), f"setup: must be run or left out, not {consent!r}")
    which = [a for a in arguments if a not in settings and a.partition("=")[0] not in named]
    place = named.get("runs_dir", "runs")
    require(bool(place.strip()), f"runs_dir: must name a folder, not {place!r}")
    runs_dir = Path(place)
    folders = select(which, runs_dir)
    wait: bool = read(bool, value_in("wait=" + named.get("wait", "false")), "wait")
    return COMMANDS[command](folders, runs_dir, changes_of(settings), Consent(wait, consent == "run"))


class Consent(NamedTuple):
    """What the command line allows: to wait for the jobs, and to run the shell lines that run folders name."""

    wait: bool
    setup: bool


def status(folders: Sequence[RunFolder], runs_dir: Path, changes: Mapping[str, Any], consent: Consent) -> int:
    queues_now = Queues()
    say("\n".join(status_table([look(folder, queues_now) for folder in folders], names(folders))))
    return 0


def cancel(folders: Sequence[RunFolder], runs_dir: Path, changes: Mapping[str, Any], consent: Consent) -> int:
    """End the runs that are queued or running, with a checkpoint if Slurm or the queue gives them time for one."""
    with one_at_a_time(runs_dir):
        in_flight = [run for run in run_states(folders) if run.in_flight]
        tickets = [run.ticket for run in in_flight if run.ticket]
        for run in in_flight:
            if run.ticket:
                replace(run.ticket, cancelled=True).write(run.folder)
                if run.waits:
                    run.folder.update(state="cancelled")
        queues.cancel(tickets)
    for run in in_flight:
        by_hand = f"not cancelled: process {run.status.pid} on {run.status.host} runs it; stop it there"
        say(f"{f'cancelled: job {run.ticket.job_id}' if run.ticket else by_hand}  {run.folder.path}")
    say(f"{len(tickets)} of {len(folders)} runs cancelled")
    return int(len(tickets) < len(in_flight))


def retry(folders: Sequence[RunFolder], runs_dir: Path, changes: Mapping[str, Any], consent: Consent) -> int:
    """Submit the failed and preempted runs that are in no queue again, with today's code, each to its old queue."""
    with one_at_a_time(runs_dir):
        again = [run for run in run_states(folders) if run.state in RETRIED and not run.in_flight]
        groups: dict[tuple[Local | Slurm, str], list[RunFolder]] = defaultdict(list)
        for run in again:
            if run.ticket:
                groups[changed(run.ticket.settings, changes), run.ticket.cwd].append(run.folder)
            else:
                never = (run.status.reason or "").startswith(remote.NOT_SUBMITTED)
                how = "was never submitted" if never else "ran inline"
                say(f"left alone: {run.folder.path} {how}; run its command again to continue it")
        if "setup" not in changes and not consent.setup:
            check_setup(settings for settings, _ in groups)
        jobs = {key: jobs_of(group, *key) for key, group in groups.items()}  # all are checked before one is submitted
        for (settings, cwd), own_jobs in jobs.items():
            with chdir(cwd):
                remote.submit(remote.claim_all(own_jobs), settings)
    retried = [RunFolder(job.folder) for own_jobs in jobs.values() for job in own_jobs]
    for folder in retried:
        if ", " in folder.code():
            say(f"continues with other code than before: {folder.path}")
    if retried:
        show(retried, names(retried))
    why = "" if retried else "; only failed and preempted runs that are in no queue can be submitted again"
    say(f"{len(retried)} of {len(folders)} runs submitted again{why}")
    return int(any(run.state not in DONE for run in wait_for(retried))) if consent.wait and retried else 0


def check_setup(settings: Iterable[Local | Slurm]) -> None:
    """Raise ConfigError if there are shell lines to run: they come from run folders, which may be somebody else's."""
    lines = list(dict.fromkeys(line for own in settings for line in own.setup))
    require(
        not lines,
        f"setup: the folders of these runs name shell lines to run before each job: {'; '.join(lines)}; setup=run "
        "runs them, hydra.launcher.setup=[...] replaces them",
    )


Command = Callable[[Sequence[RunFolder], Path, Mapping[str, Any], Consent], int]
COMMANDS: dict[str, Command] = {"status": status, "cancel": cancel, "retry": retry}


def run_states(folders: Iterable[RunFolder]) -> list[RunState]:
    now = Queues()
    return [observe(folder, now) for folder in folders]


def changes_of(settings: Sequence[str]) -> dict[str, Any]:
    """Return the changes that arguments hydra.launcher.KEY=VALUE ask for, with VALUE read as YAML."""
    return {each.lstrip("+").removeprefix(SETTING).partition("=")[0]: value_in(each) for each in settings}


def value_in(argument: str) -> Any:
    """Return VALUE of KEY=VALUE, read as YAML. Raises ConfigError."""
    try:
        return yaml.safe_load(argument.partition("=")[2])
    except yaml.YAMLError as error:
        raise ConfigError(f"{argument}: cannot be read ({one_line(error)})") from None


def changed(settings: Local | Slurm, changes: Mapping[str, Any]) -> Local | Slurm:
    now = read_launcher(plain(settings) | dict(changes))
    assert isinstance(now, Local | Slurm)
    return now


def jobs_of(folders: Sequence[RunFolder], settings: Local | Slurm, cwd: str) -> list[Job]:
    """Return the jobs of these folders, planned for where they will run, with paths relative to `cwd`.

    Raises ConfigError if the current code, or the processes that the settings ask for, cannot run them.
    """
    absolute = [RunFolder(folder.path.absolute()) for folder in folders]
    with planned_for(gpus_per_node(settings)), chdir(cwd):
        jobs = [job_of(folder) for folder in absolute]
        check_asked(jobs, settings)
    return jobs


def job_of(folder: RunFolder) -> Job:
    """Return the job of a run, read from its folder. Raises ConfigError if the current code cannot run it."""
    config = folder.config()
    study = study_of(config.study)
    study.check(config)
    about, status = folder.provenance(), folder.status()
    return Job(
        config,
        status.fingerprint,
        folder.path,
        label=about["label"],
        overrides=tuple(about["overrides"]),
        choices=about["choices"],
        state="resume",
        backend=study.backends(config),
    )
