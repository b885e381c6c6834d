"""What a sweep has to do: every job validated, named by its fingerprint, and compared with the runs that exist."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mxstudy.config import fingerprint, read_run
from mxstudy.launch.composed import Composed
from mxstudy.launch.many import spread
from mxstudy.launch.observe import DONE, observe
from mxstudy.launch.observed import asked_otherwise, check_used, off_then
from mxstudy.launch.queues import QueueError, Queues
from mxstudy.launch.ticket import drop_ticket
from mxstudy.reader import ConfigError, require
from mxstudy.studies.checks import CHECKS, backend_of, vain_settings_of
from mxstudy.tracking.folder import RunFolder, RunLocked, find_run
from mxstudy.tracking.provenance import provenance
from mxstudy.train.runtime import is_planned, resolve_device


@dataclass(frozen=True)
class Job:
    """`label` says what varies among the jobs of this sweep; `choices` maps each config group to its choice.

    `state`: new and resume are to be run, queued and running are another process's, finished and diverged are there.
    `replaces`: the run that `rerun=true` moves aside. `parent_id`: of the sweep's run in MLflow, where there is one.
    `backend`: those that its blocks will run on, None without a model. `also`: the overrides of further jobs of this
    sweep that are the same run, told apart by them as by `label`.
    """

    config: Any  # a mxstudy.config.Run
    fingerprint: str
    folder: Path
    label: str
    overrides: tuple[str, ...]
    choices: dict[str, str]
    state: str = "new"
    replaces: Path | None = None
    parent_id: str | None = None
    backend: str | None = None
    also: tuple[str, ...] = ()


def plan(composed: list[Composed]) -> list[Job]:
    """The jobs in order, one a fingerprint. Writes nothing.

    Raises ConfigError that lists every job which cannot run: then none of them does.
    """
    queues = Queues()
    identities: dict[Any, tuple[str, dict[str, Any]]] = {}
    jobs: dict[str, Job] = {}
    errors: dict[str, list[str]] = defaultdict(list)
    valid = spread(validate, composed)
    vain = vain_overrides(composed, valid)
    for one, found, label in zip(composed, valid, labels(composed), strict=True):
        try:
            if isinstance(found, ConfigError):
                raise found
            for line in one.overrides:
                require(line not in vain, vain.get(line, ""))
            config, backend = found
            known = CHECKS[config.study]
            key = (config.study, known.identity_key(config))
            if key not in identities:
                identities[key] = known.identity(config)
            digest = fingerprint(config, *identities[key])
            if digest in jobs:
                for probe in off_then(jobs[digest].config, config):
                    raise ConfigError(f"{probe}: is off in {jobs[digest].label}, which is the same run")
                for asked in asked_otherwise(jobs[digest].config, config):
                    raise ConfigError(f"{asked}: is another in {jobs[digest].label}, which is the same run")
                jobs[digest] = replace(jobs[digest], also=(*jobs[digest].also, label))
            else:
                folder = Path(config.runs_dir) / config.experiment / digest[:12]
                job = Job(config, digest, folder, label, one.overrides, one.choices, backend=backend)
                jobs[digest] = compare(job, queues)
        except QueueError:
            raise
        except ConfigError as error:
            errors[str(error)].append(label)
    require(not errors, refusal(errors, len(composed)))
    return list(jobs.values())


class Valid(NamedTuple):
    """The config of a job, checked as far as that goes without running it, and the backends that it will run on."""

    config: Any
    backend: str | None


def validate(composed: Sequence[Composed]) -> Iterator[Valid | ConfigError]:
    """Each job as it is valid, or the ConfigError that it has."""
    for one in composed:
        try:
            if isinstance(one.values, ConfigError):
                raise one.values
            config: Any = read_run(one.values)
            check_used(config)
            CHECKS[config.study].check(config)
            yield Valid(pinned(config), backend_of(config))
        except ConfigError as error:
            yield error


def vain_overrides(composed: Sequence[Composed], valid: Sequence[Valid | ConfigError]) -> dict[str, str]:
    """Return each override that sets what none of its jobs takes, with the reason.

    Arms may share a setting that only some of them take: `precision=bf16,mxfp8 precision.rounding=away` is a baseline
    and one arm, and the plan of bf16 says what it does not take.
    """
    messages: dict[str, list[str | None]] = defaultdict(list)
    for one, found in zip(composed, valid, strict=True):
        own = {line: line.lstrip("+").partition("=")[0] for line in one.overrides}
        if isinstance(found, ConfigError) or not any(key.startswith("precision.") for key in own.values()):
            continue
        vain = vain_settings_of(found.config)
        for line, key in own.items():
            messages[line].append(vain.get(key))
    return {line: some[0] for line, some in messages.items() if some[0] is not None and None not in some}


def pinned(config: Any) -> Any:
    """What is hashed is what will run: the checkpoint that is the newest now; elsewhere, on this kind of device."""
    known = CHECKS[config.study]
    if hasattr(known, "pinned"):
        config = known.pinned(config)
    if hasattr(config, "train") and is_planned():
        device = resolve_device(config.train.device).type
        return replace(config, train=replace(config.train, device=device))
    if hasattr(config, "device") and is_planned():
        return replace(config, device=resolve_device(config.device, "device").type)
    return config


def compare(job: Job, queues: Queues | None = None) -> Job:
    """The job with the folder and state of the run that has its fingerprint now, in whatever experiment that was.

    Raises QueueError where that run may be in a queue that cannot be asked.
    """
    found = find_run(Path(job.config.runs_dir), job.fingerprint)
    if found is None:
        return job
    seen = observe(found, queues or Queues())
    if seen.in_flight:
        return replace(job, folder=found.path, state="queued" if seen.waits else "running")
    if job.config.rerun:
        return replace(job, replaces=found.path)
    for probe in off_then(found.config(), job.config):
        raise ConfigError(f"{probe}: was off in {found.path}, which has none of its data; rerun=true trains again")
    for asked in asked_otherwise(found.config(), job.config):
        raise ConfigError(
            f"{asked}: was another in {found.path}; +experiment=olmes asks its checkpoints, rerun=true trains again"
        )
    return replace(job, folder=found.path, state=seen.state if seen.state in DONE else "resume")


def labels(composed: list[Composed]) -> list[str]:
    """Of each job the overrides that not all jobs share; where nothing varies what it is."""
    keys = varying([one.overrides for one in composed])
    return [
        " ".join(line for key, line in by_key(one.overrides).items() if key in keys) or title(one) for one in composed
    ]


def title(one: Composed) -> str:
    """Its precision and norm; if they are a checkpoint's own, that; else the experiment's name."""
    choices = [f"{group}={one.choices[group]}" for group in ("precision", "norm") if group in one.choices]
    named = " ".join(choice for choice in choices if not choice.endswith("=as_trained"))
    return named or by_key(one.overrides).get("checkpoint") or one.choices.get("experiment", "unnamed")


def varying(jobs: Sequence[Sequence[str]]) -> list[str]:
    """The keys of overrides that not all jobs share, in the order in which they are written."""
    lines = [by_key(job) for job in jobs]
    keys = dict.fromkeys(key for job in lines for key in job)
    return [key for key in keys if len({job.get(key) for job in lines}) > 1]


def by_key(overrides: Sequence[str]) -> dict[str, str]:
    return {line.partition("=")[0]: line for line in overrides}


def refusal(errors: dict[str, list[str]], total: int) -> str:
    """Each error once, with the jobs that have it; bare where all jobs share the one error."""
    if [len(names) for names in errors.values()] == [total]:
        return next(iter(errors))
    bad = sum(map(len, errors.values()))
    lines = [
        f"  {message if message.startswith(name) else f'{name}: {message}'}"
        for message, names in errors.items()
        for name in names
    ]
    return "\n".join([f"{bad} of {total} jobs cannot run, so none was started:", *lines])


def claim(job: Job) -> RunFolder:
    """The folder of a job that is about to run: made if new, a replaced run moved aside to FOLDER.old-N.

    Raises RunLocked if another process made it first.
    """
    backend = {"backend": job.backend} if job.backend else {}
    if job.state == "resume":
        folder = RunFolder(job.folder)
        drop_ticket(folder)
        folder.go_on(job.config, provenance() | backend)
        folder.update(mlflow_parent_id=job.parent_id)
        return folder
    if job.replaces is not None:
        move_aside(job.replaces)
    asked = {"overrides": list(job.overrides), "choices": job.choices, "label": job.label} | backend
    try:
        return RunFolder.create(job.folder, job.config, job.fingerprint, provenance() | asked, job.parent_id)
    except ConfigError as error:
        raise RunLocked(str(error)) from None


def move_aside(folder: Path) -> Path:
    taken = {path.name for path in folder.parent.iterdir()}
    number = next(n for n in range(1, len(taken) + 2) if f"{folder.name}.old-{n}" not in taken)
    return folder.rename(folder.with_name(f"{folder.name}.old-{number}"))


def newest_aside(folder: Path) -> Path:
    return max(folder.parent.glob(f"{folder.name}.old-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def differences(folder: RunFolder) -> str:
    """In which of commit, torch version and GPU that run differs from one started now; '' if in none."""
    about, now = folder.provenance(), provenance()
    then = [about, *about.get("resumed", [])][-1]
    changed = [key for key in ("commit", "torch", "gpu") if then.get(key) != now.get(key)]
    return ", ".join(f"{key} {then.get(key)} then, {now.get(key)} now" for key in changed)
