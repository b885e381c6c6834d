"""The MLflow records of a sweep as a whole, and the lines that a launcher prints about it.

A sweep is the jobs of one launch, experiment and tracking store, if there is more than one.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mxstudy import config
from mxstudy.launch.job import Job
from mxstudy.launch.job_arms import arm_names
from mxstudy.launch.labels import shared_changes, varying
from mxstudy.launch.say import say
from mxstudy.reader import ConfigError
from mxstudy.reader import one_line as said_by
from mxstudy.studies import study_of
from mxstudy.tracking.code import different_code
from mxstudy.tracking.folder import DONE
from mxstudy.tracking.mixed_backends import REMEDY, different_backends
from mxstudy.tracking.mlflow_parent import Summary, Sweep
from mxstudy.tracking.mlflow_store import one_line
from mxstudy.tracking.silence import answers_of

REPAIR = "run the same command again to repair it"


def end(jobs: list[Job], summaries: Mapping[str, Summary], state: str | None = None) -> None:
    """Give every parent run its children, its summary and its final state: `state`, or else the worst of its jobs'.

    `summaries`: by `study`.
    """
    states = {job.fingerprint: job for job in jobs}
    for sweep in sweeps(jobs):
        own = [states[fingerprint] for fingerprint in sweep.folders]
        summary = summaries.get(own[0].config.study, Summary(""))
        try:
            answers_of(sweep.uri).check()
            sweep.end(state or state_of(own), replace(summary, markdown=summary.markdown + not_done(own)))
        except Exception as error:
            say(f"tracking: {one_line(sweep.uri, error)}; {REPAIR}")


def backends_sentence(jobs: Sequence[Job]) -> str | None:
    """Return a sentence that names the backends of the arms, or None if all arms run on the same."""
    if len({job.backend for job in jobs}) < 2:
        return None
    has_option = all(getattr(job.config, "precision", None) is not None for job in jobs)
    return different_backends(
        zip(arm_names(jobs), (job.backend for job in jobs), strict=True), REMEDY if has_option else ""
    )


def code_sentence(jobs: Sequence[Job]) -> str | None:
    """Return a sentence that names the code of the jobs' runs, or None if the same code made all of them."""
    return different_code(job.run.provenance() | {"code": job.run.code(), "study": job.config.study} for job in jobs)


def merged(jobs: Sequence[Job]) -> list[str]:
    """Return a line for each run that several jobs of the sweep share, with the overrides that make no difference."""
    return [
        f"One run, because the configs are the same: {'; '.join((job.label, *job.also))}" for job in jobs if job.also
    ]


def summarise(jobs: list[Job]) -> dict[str, Summary]:
    """Return each kind of run's summary of its finished jobs, by `study`, with what else differs between their runs.

    If a summary fails, a line says why, and that the runs are complete. The traceback of what no user can cause goes to
    stderr.
    """
    summaries = {}
    for kind in config.STUDIES:
        done = [job for job in jobs if job.config.study == kind and job.state in DONE]
        if done:
            try:
                summaries[kind] = summary_of(kind, done)
            except Exception as error:  # a disk or a library may raise anything, and the sweep must still end
                what = f"all {len(done)} runs of {kind} are complete, but could not be summed up or drawn"
                say(f"{what} ({type(error).__name__}: {said_by(error)}); {REPAIR}")
                if not isinstance(error, ConfigError | OSError):
                    traceback.print_exc()
    return summaries


def summary_of(kind: str, done: list[Job]) -> Summary:
    summary = study_of(kind).summarise({job.name: job.run for job in done}, done[0].config.baseline)
    as_run = [replace(job, backend=job.run.backend()) for job in done]
    for sentence in filter(None, (backends_sentence(as_run), code_sentence(done))):
        say(sentence)
        summary = replace(summary, markdown=f"{summary.markdown}\n\n{sentence}")
    return summary


def sweeps(jobs: list[Job]) -> list[Sweep]:
    groups: dict[tuple[str, str], list[Job]] = defaultdict(list)
    for job in jobs:
        if job.config.tracking.uri is not None:
            groups[job.config.tracking.uri, job.config.experiment].append(job)
    return [sweep_of(*key, group) for key, group in groups.items() if len(group) > 1]


def sweep_of(uri: str, experiment: str, jobs: list[Job]) -> Sweep:
    """Return the sweep, named after its file, what varies and what the command changes in all its jobs.

    The choices that all jobs share are its tags.
    """
    shared = set.intersection(*(set(job.choices.items()) for job in jobs))
    tags = dict(sorted(shared)) | {"experiment": experiment, "study": jobs[0].config.study}
    keys = ", ".join(varying([job.overrides for job in jobs]))
    said = "".join(f" {line}" for line in shared_changes(jobs))
    name = f"{tags.get('sweep', experiment)}: {keys}{said and ';'}{said}"
    folders, arms = {job.fingerprint: job.run for job in jobs}, {job.fingerprint: job.arm for job in jobs}
    return Sweep(uri, jobs[0].config.mlflow_experiment, name, tags, folders, arms)


def state_of(jobs: list[Job]) -> str:
    """Return the worst of the jobs' states; diverged counts as finished."""
    states, from_worst = {job.state for job in jobs}, ("preempted", "failed", "cancelled", "running", "queued")
    not_begun = "preempted" if states & {"new", "resume"} else "finished"  # a signal came before they started
    return next((state for state in from_worst if state in states), not_begun)


def not_done(jobs: list[Job]) -> str:
    lines = [f"- {job.state}: {job.label}" for job in jobs if job.state not in DONE]
    return "\n".join(["", "", "Not done:", "", *lines]) if lines else ""
