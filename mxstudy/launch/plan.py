"""The plan of a sweep: every job validated, named by its fingerprint, and compared with the runs that exist."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mxstudy.config import STUDIES, AnyRun, fingerprint, read_run
from mxstudy.launch.claiming import origin
from mxstudy.launch.composed import Composed
from mxstudy.launch.job import Job
from mxstudy.launch.job_arms import with_arms
from mxstudy.launch.labels import labels
from mxstudy.launch.process_pool import MANY, begin_in_processes
from mxstudy.launch.queues import QueueError, Queues
from mxstudy.launch.refusal import refusal
from mxstudy.launch.run_state import observe
from mxstudy.launch.stale import check_code, check_data, is_refused
from mxstudy.reader import ConfigError, require
from mxstudy.studies import study_of
from mxstudy.studies.folders import check_folder
from mxstudy.tracking.folder import DONE, NAME_LENGTH, RunFolder, RunLocked
from mxstudy.tracking.found_runs import find_runs, newest, runs_by_fingerprint
from mxstudy.tracking.mlflow_store import check_uri

MAY_BE_UNUSED = ("precision.", "probe.")  # sections with settings that `unused_settings` may name


def plan(composed: list[Composed]) -> list[Job]:
    """Return the jobs in order, one for each fingerprint. Writes nothing, except that `compare` may put a run back.

    Raises ConfigError with every job that cannot run; then no job is started.
    """
    queues, stored = Queues(), functools.cache(runs_by_fingerprint)
    identities: dict[Any, tuple[str, dict[str, Any]]] = {}
    jobs: dict[str, Job] = {}
    errors: dict[str, list[str]] = defaultdict(list)
    kinds = STUDIES.keys() & {str(job.values.get("study")) for job in composed if isinstance(job.values, dict)}
    for kind in kinds:
        study_of(kind)  # imports it here, because else each process of `validate` would
    validated = begin_in_processes(validate, composed)
    for kind in kinds if len(composed) >= MANY else ():
        origin(kind)  # while the processes work; `claim` will need it
    valid = validated()
    unused = unused_overrides(composed, valid)
    for request, checked, label in zip(composed, valid, labels(composed), strict=True):
        try:
            if isinstance(checked, ConfigError):
                raise checked
            for line in request.overrides:
                require(line not in unused, unused.get(line, ""))
            config, backend = checked
            study = study_of(config.study)
            key = (config.study, study.identity_key(config))
            if key not in identities:
                identities[key] = study.identity(config)
            digest = fingerprint(config, *identities[key])
            if digest in jobs:
                jobs[digest] = also_asked(jobs[digest], config, label)
            else:
                runs_dir = Path(config.runs_dir)
                folder = runs_dir / config.experiment / digest[:NAME_LENGTH]
                job = Job(config, digest, folder, label, request.overrides, request.choices, backend=backend)
                job = replace(job, device_type=identities[key][0])
                jobs[digest] = job = compare(job, stored(runs_dir)(digest), queues)
                check_code(job.run, job.config, job.state, job.device_type)
        except QueueError:
            raise
        except ConfigError as error:
            errors[str(error)].append(label)
    require(not errors, refusal(errors, len(composed)))
    return with_arms(list(jobs.values()))


def also_asked(job: Job, config: AnyRun, label: str) -> Job:
    """Return a planned job that another request asks for under that label. Raises ConfigError if it observes more."""
    study = study_of(config.study)
    found = dict.fromkeys(study.newly_on(job.config, config), "is off")
    found |= dict.fromkeys(study.changed_questions(job.config, config), "differs")
    for key, what in found.items():
        raise ConfigError(f"{key}: {what} in {job.label}, which is the same run; set both alike")
    return job if label in (job.label, *job.also) else replace(job, also=(*job.also, label))


class Valid(NamedTuple):
    """A valid job: its config, and the backends that its blocks will run on."""

    config: AnyRun
    backend: str | None


def validate(composed: Sequence[Composed]) -> Iterator[Valid | ConfigError]:
    """Yield for each job its valid config, or the ConfigError that it raises."""
    check_once = functools.cache(check_folder)  # most jobs of a sweep write to the same folder
    for job in composed:
        try:
            if isinstance(job.values, ConfigError):
                raise job.values
            config = read_run(job.values)
            if config.tracking.uri is not None:
                check_uri(config.tracking.uri, "tracking.uri")
            config.check_seeds()
            study = study_of(config.study)
            name = config.experiment
            require("/" not in name, f"experiment: {name!r} is in a sub-folder; move its file to experiment/ itself")
            check_once("runs_dir", Path(config.runs_dir) / name)
            study.check_watched(config)
            study.check(config)
            yield Valid(study.pinned(config), study.backends(config))
        except ConfigError as error:
            yield error


def unused_overrides(composed: Sequence[Composed], valid: Sequence[Valid | ConfigError]) -> dict[str, str]:
    """Return each override that none of its jobs uses, with the reason.

    Arms may share a setting that only some of them use: `precision=bf16,mxfp8 precision.rounding=away` is a baseline
    and an arm, and the plan of bf16 reports the unused setting. What undoes a setting of the experiment is used.
    """
    messages: dict[str, list[str | None]] = defaultdict(list)
    for job, checked in zip(composed, valid, strict=True):
        own = {line: line.lstrip("+").partition("=")[0] for line in job.overrides}
        if isinstance(checked, ConfigError) or not any(key.startswith(MAY_BE_UNUSED) for key in own.values()):
            continue
        unused = study_of(checked.config.study).unused_settings(checked.config)
        for line, key in own.items():
            messages[line].append(None if line in job.undoes else unused.get(key))
    return {line: reasons[0] for line, reasons in messages.items() if reasons[0] is not None and None not in reasons}


def stored_runs(job: Job) -> list[RunFolder]:
    """Return the runs of the job's fingerprint, in any experiment."""
    return find_runs(Path(job.config.runs_dir), f"*/{job.fingerprint[:NAME_LENGTH]}")


def compare(job: Job, there: Iterable[RunFolder], queues: Queues) -> Job:
    """Return the job with folder and state of the newest existing run of its fingerprint; unchanged if there is none.

    If a rerun was killed after it had set a run aside and before it made its own folder, the run is put back, with a
    line.

    Raises QueueError if the run may be in a queue that cannot be asked.
    """
    found = newest(there)
    if found is None:
        return job
    if found.path != found.own_path and not job.config.dry_run:
        try:
            found = found.put_back()
        except RunLocked:
            return replace(job, folder=found.path, state="running")
        print(f"{found.path}: was put back; a rerun was killed after it had set it aside", flush=True)
    found.memberships()  # this sweep will be added to them, so an unreadable file is refused here
    run = observe(found, queues)
    if run.in_flight:
        return replace(job, folder=found.path, state="queued" if run.waits else "running")
    study, state = study_of(job.config.study), run.state if run.state in DONE else "resume"
    if job.config.rerun or (job.config.stale == "rerun" and is_refused(found, job.config, state, job.device_type)):
        config = job.config
        with suppress(ConfigError):  # an unreadable config adds nothing to watch
            config = study.with_watched_of(found.config(), config)
        return replace(job, config=config, folder=found.path, state="new", replaces=found.path)
    check_data(found, job.config)
    config = study.with_watched_of(found.config(), job.config) if state == "resume" else job.config
    return replace(job, config=config, folder=found.path, state=state)
