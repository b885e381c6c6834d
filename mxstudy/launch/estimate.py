"""dry_run=true: what a sweep would do, and about what it would cost. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mxstudy.config import Inline, Launcher
from mxstudy.distributed import world_size
from mxstudy.launch.plan import Job
from mxstudy.launch.processes import gpus_per_node, tasks_per_node
from mxstudy.launch.table import aligned
from mxstudy.studies import study_of
from mxstudy.studies.pretrain.study import GPU, MFU_BF16, MFU_MX
from mxstudy.studies.protocol import Cost
from mxstudy.tracking.folder import RunFolder

OF_FLOPS = "FLOPs: forward and backward of the steps that are left, without validation, probes and recomputation."
OF_HOURS = f"""\
GPU hours: at the MFU that a Llama of 125M reached on an {GPU}, {MFU_BF16:.0%} in bf16 and {MFU_MX:.0%} with MX
arithmetic emulated."""


def show(jobs: Sequence[Job], settings: Launcher) -> None:
    """A row a job, and the sum. Raises ConfigError where the launcher's settings do not suit the jobs."""
    todo = [job for job in jobs if job.state in ("new", "resume")]
    gpus = {job.fingerprint: gpus_of(job, settings) for job in todo}
    costs = {job.fingerprint: study_of(job.config.study).cost(job.config, steps_done(job)) for job in todo}
    rows = [["what", "state", "GPUs", "tokens", "FLOPs", "GPU hours", "folder"]]
    for job in jobs:
        known = job.fingerprint in costs
        words = columns(gpus[job.fingerprint], costs[job.fingerprint]) if known else [""] * 4
        rows.append([job.label, job.state, *words, str(job.folder)])
    total = sum(costs.values(), Cost())
    rows.append([f"{len(todo)} of {len(jobs)} jobs to run", "", *columns(sum(gpus.values()), total), ""])
    notes = [note for value, note in ((total.flops, OF_FLOPS), (total.gpu_hours, OF_HOURS)) if value]
    print("\n".join([*aligned(rows), *notes]), flush=True)


def columns(gpus: int, of: Cost) -> list[str]:
    """Return the cells of GPUs, samples, FLOPs and GPU hours; one that is not known is empty."""
    hours = f"{of.gpu_hours:,.2f}" if of.gpu_hours else ""
    return [str(gpus), f"{of.samples:.3g}" if of.samples else "", f"{of.flops:.3g}" if of.flops else "", hours]


def gpus_of(job: Job, settings: Launcher) -> int:
    """Inline one for each of the processes that were started together, where there is any."""
    per_node = gpus_per_node(settings)
    if isinstance(settings, Inline) or per_node is None:
        return world_size() if torch.cuda.is_available() else 0
    tasks_per_node(job.config.study, settings)
    return getattr(settings, "nodes", 1) * per_node


def steps_done(job: Job) -> int:
    """Those of its newest checkpoint, from which it goes on."""
    return max(RunFolder(job.folder).checkpoint_steps(), default=0) if job.state == "resume" else 0
