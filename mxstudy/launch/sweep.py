"""What a launcher says to MLflow about a sweep as a whole: at its beginning, and at its end or whenever it is asked.

A sweep is what one launch asks of one experiment and one store, if that is more than one job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mxstudy import config
from mxstudy.launch.observe import DONE
from mxstudy.launch.plan import Job, varying
from mxstudy.numerics.ranks import is_first
from mxstudy.studies import STUDIES
from mxstudy.tracking.arms import REMEDY, different_backends
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow import create_store, one_line
from mxstudy.tracking.sweep import Summary, Sweep

AGAIN = "the same command, run again, puts it right"


def begin(jobs: list[Job]) -> list[Job]:
    """The jobs with their parents' ids, for their folders; each tracking database is made once, before they need it.

    A store that cannot be reached is a line, and the jobs go on with their journals.
    """
    uris = {job.config.tracking.uri for job in jobs} - {None}
    away = {uri: reason for uri in sorted(uris) if (reason := create_store(uri))}
    for reason in away.values():
        say(f"tracking: {reason}; the runs go on with their journals")
    parents: dict[str, str] = {}
    for sweep in sweeps(jobs):
        if sweep.uri not in away:
            try:
                parents |= dict.fromkeys(sweep.folders, sweep.begin())
            except Exception as error:  # whatever a server or a driver comes up with
                say(f"tracking: {one_line(sweep.uri, error)}; {AGAIN}")
    return [replace(job, parent_id=parents.get(job.fingerprint)) for job in jobs]


def end(jobs: list[Job], summaries: Mapping[str, Summary]) -> None:
    """Parents get their children, their summary and how it ended: `jobs` as they are now, summaries by `study`."""
    states = {job.fingerprint: job for job in jobs}
    for sweep in sweeps(jobs):
        own = [states[fingerprint] for fingerprint in sweep.folders]
        summary = summaries.get(own[0].config.study, Summary(""))
        try:
            sweep.end(state_of(own), replace(summary, markdown=summary.markdown + not_done(own)))
        except Exception as error:
            say(f"tracking: {one_line(sweep.uri, error)}; {AGAIN}")


def different_roads(jobs: Sequence[Job]) -> str | None:
    """Return a sentence that says on which backends the arms run; None where all run on the same."""
    has_option = all(getattr(job.config, "precision", None) is not None for job in jobs)
    return different_backends([(job.label, job.backend) for job in jobs], REMEDY if has_option else "")


def merged(jobs: Sequence[Job]) -> list[str]:
    """Return a line for each run that several jobs of the sweep come to, with the overrides that make no difference."""
    return [
        f"One run, for they come to the same config: {'; '.join((job.label, *job.also))}" for job in jobs if job.also
    ]


def summarize(jobs: list[Job]) -> dict[str, Summary]:
    """Each kind of run sums up what it has, runs that were skipped included, and says on what they ran: by `study`."""
    summaries = {}
    for kind in config.STUDIES:
        done = [job for job in jobs if job.config.study == kind and job.state in DONE]
        if done:
            arms = {job.label: RunFolder(job.folder) for job in done}
            summary = STUDIES[kind].summarize(arms, done[0].config.baseline)
            if sentence := different_roads([replace(job, backend=RunFolder(job.folder).backend()) for job in done]):
                say(sentence)
                summary = replace(summary, markdown=f"{summary.markdown}\n\n{sentence}")
            summaries[kind] = summary
    return summaries


def sweeps(jobs: list[Job]) -> list[Sweep]:
    groups: dict[tuple[str, str], list[Job]] = defaultdict(list)
    for job in jobs:
        if job.config.tracking.uri is not None:
            groups[job.config.tracking.uri, job.config.experiment].append(job)
    return [sweep_of(*key, group) for key, group in groups.items() if len(group) > 1]


def sweep_of(uri: str, experiment: str, jobs: list[Job]) -> Sweep:
    """Named after its file and what varies; its tags are the choices that all its jobs share."""
    shared = set.intersection(*(set(job.choices.items()) for job in jobs))
    tags = dict(sorted(shared)) | {"experiment": experiment, "study": jobs[0].config.study}
    keys = ", ".join(varying([job.overrides for job in jobs]))
    name = f"{tags.get('sweep', experiment)}: {keys}"
    return Sweep(uri, experiment, name, tags, {job.fingerprint: RunFolder(job.folder) for job in jobs})


def state_of(jobs: list[Job]) -> str:
    """The worst of the jobs' states; what diverged is done."""
    states, from_worst = {job.state for job in jobs}, ("preempted", "failed", "cancelled", "running", "queued")
    not_begun = "preempted" if states & {"new", "resume"} else "finished"  # a signal came before their turn
    return next((state for state in from_worst if state in states), not_begun)


def not_done(jobs: list[Job]) -> str:
    lines = [f"- {job.state}: {job.label}" for job in jobs if job.state not in DONE]
    return "\n".join(["", "", "Not done:", "", *lines]) if lines else ""


def say(line: str) -> None:
    if is_first():
        print(line, flush=True)
