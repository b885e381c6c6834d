"""dry_run=true: print a sweep's jobs and their estimated cost, and write nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from mxstudy.config import Inline, Launcher
from mxstudy.distributed import world_size
from mxstudy.launch.job import Job
from mxstudy.launch.processes import gpus_per_node, tasks_per_node
from mxstudy.launch.table import aligned
from mxstudy.studies import study_of
from mxstudy.studies.protocol import Cost
from mxstudy.tracking.folder import RunFolder

OF_FLOPS = "FLOPs: forward and backward of the remaining steps, without validation, probes and recomputation."
FORMS = {"samples": ".3g", "flops": ".3g", "gpu_hours": ",.2f"}  # how the values of a Cost are written


def show(jobs: Sequence[Job], settings: Launcher) -> None:
    """Print one row per job, and the sum. Raises ConfigError if the launcher's settings do not suit the jobs."""
    todo = [job for job in jobs if job.state in ("new", "resume")]
    gpus = {job.fingerprint: gpus_of(job, settings) for job in todo}
    costs = {job.fingerprint: study_of(job.config.study).cost(job.config, steps_done(job)) for job in todo}
    rows = [["what", "the same run as", "state", "GPUs", "tokens", "FLOPs", "GPU hours", "folder"]]
    for job in jobs:
        has_cost = job.fingerprint in costs
        cells = columns(gpus[job.fingerprint], [costs[job.fingerprint]]) if has_cost else [""] * 4
        rows.append([job.label, "; ".join(job.also), job.state, *cells, str(job.folder)])
    together = columns(sum(gpus.values()), list(costs.values()))
    rows.append([f"{len(todo)} of {len(jobs)} jobs to run", "", "", *together, ""])
    studies = [(study_of(job.config.study), job.config) for job in todo]
    notes = {note for study, config in studies for note in (study.gpu_hours_note(config), study.recomputation(config))}
    of_flops = [OF_FLOPS] if any(cost.flops for cost in costs.values()) else []
    print("\n".join([*aligned(rows), *about_models(todo), *of_flops, *sorted(notes - {""})]), flush=True)


def about_models(jobs: Sequence[Job]) -> list[str]:
    """Return the notes on the jobs' models, and of a job that is alone its precision plan too."""
    notes = model_notes(jobs)
    if len(jobs) != 1:
        return notes
    plan = study_of(jobs[0].config.study).precision_plan(jobs[0].config)
    return notes + [line for line in plan if not any(note.endswith(line) for note in notes)]


def model_notes(jobs: Sequence[Job]) -> list[str]:
    """Return a line for each note on a model, with the jobs whose model it is about."""
    of_jobs: dict[str, list[str]] = defaultdict(list)
    for job in jobs:
        for note in study_of(job.config.study).model_notes(job.config):
            of_jobs[note].append(job.label)
    return [f"{labels[0] if len(labels) == 1 else f'{len(labels)} jobs'}: {note}" for note, labels in of_jobs.items()]


def columns(gpus: int, costs: Sequence[Cost]) -> list[str]:
    """Return the cells for GPUs, and for samples, FLOPs and GPU hours of all the costs together."""
    return [str(gpus), *(total([getattr(cost, name) for cost in costs], form) for name, form in FORMS.items())]


def total(values: Sequence[float | None], form: str) -> str:
    """Return the sum as text: empty if all values are unknown, and "at least" the known ones if some are."""
    known = [value for value in values if value is not None]
    text = format(sum(known), form) if any(known) else ""
    return f"at least {text}" if text and len(known) < len(values) else text


def gpus_of(job: Job, settings: Launcher) -> int:
    """Return the number of GPUs of a job; inline it is one for each process that was started together, or 0."""
    per_node = gpus_per_node(settings)
    if isinstance(settings, Inline) or per_node is None:
        return world_size() if torch.cuda.is_available() else 0
    tasks_per_node(job.config.study, settings)
    return settings.nodes * per_node


def steps_done(job: Job) -> int:
    """Return the number of steps in the newest checkpoint of a job that resumes, else 0."""
    return max(RunFolder(job.folder).checkpoint_steps(), default=0) if job.state == "resume" else 0
