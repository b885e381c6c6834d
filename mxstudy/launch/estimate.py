"""dry_run=true: what a sweep would do, and about what it would cost. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from mxstudy.config import Inline, Launcher, Pretrain, StudentTeacher
from mxstudy.launch import ranks
from mxstudy.launch.plan import Job
from mxstudy.launch.table import aligned
from mxstudy.numerics.ranks import world_size
from mxstudy.studies.checks.pretrain import build_model
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.runtime import PEAK_FLOPS
from mxstudy.train.stack import build_student

# What of its bf16 rate a GPU has reached in pre-training: the medians of results/mxnorm_pretrain.md, bf16 and MXFP8.
GPU, MFU_BF16, MFU_MX = "NVIDIA H200", 0.43, 0.44
UNQUANTISED = {"bf16", "fp32"}  # rows of PRECISIONS
OF_FLOPS = "FLOPs: forward and backward of the steps that are left, without validation, probes and recomputation."
OF_HOURS = f"""\
GPU hours: at the MFU that a Llama of 125M reached on an {GPU}, {MFU_BF16:.0%} in bf16 and {MFU_MX:.0%} with MX
arithmetic emulated."""


@dataclass(frozen=True)
class Cost:
    """`samples`: tokens of a decoder, inputs of students, counted for every replica. None: not known."""

    gpus: int
    samples: int | None = None
    flops: float | None = None
    gpu_hours: float | None = None

    def __add__(self, other: Cost) -> Cost:
        """What is not known counts for nothing."""
        return Cost(*((getattr(self, f.name) or 0) + (getattr(other, f.name) or 0) for f in fields(Cost)))


def show(jobs: Sequence[Job], settings: Launcher) -> None:
    """A row a job, and the sum. Raises ConfigError where the launcher's settings do not suit the jobs."""
    todo = [job for job in jobs if job.state in ("new", "resume")]
    costs = {job.fingerprint: cost(job, gpus_of(job, settings)) for job in todo}
    rows = [["what", "the same run as", "state", "GPUs", "tokens", "FLOPs", "GPU hours", "folder"]]
    for job in jobs:
        words = columns(costs[job.fingerprint]) if job.fingerprint in costs else [""] * 4
        rows.append([job.label, "; ".join(job.also), job.state, *words, str(job.folder)])
    total = sum(costs.values(), Cost(0))
    rows.append([f"{len(todo)} of {len(jobs)} jobs to run", "", "", *columns(total), ""])
    notes = [note for value, note in ((total.flops, OF_FLOPS), (total.gpu_hours, OF_HOURS)) if value]
    print("\n".join([*aligned(rows), *notes]), flush=True)


def columns(of: Cost) -> list[str]:
    hours = f"{of.gpu_hours:,.2f}" if of.gpu_hours else ""
    return [str(of.gpus), f"{of.samples:.3g}" if of.samples else "", f"{of.flops:.3g}" if of.flops else "", hours]


def gpus_of(job: Job, settings: Launcher) -> int:
    """Inline one for each of the processes that were started together, where there is any."""
    gpus = ranks.gpus_per_node(settings)
    if isinstance(settings, Inline) or gpus is None:
        return world_size() if torch.cuda.is_available() else 0
    ranks.tasks_per_node(job.config.study, settings)
    return getattr(settings, "nodes", 1) * gpus


def cost(job: Job, gpus: int) -> Cost:
    config: Any = job.config
    measure = COSTS.get(config.study)
    if measure is None:
        return Cost(gpus)
    return measure(config, config.train.steps - steps_done(job), gpus)


def steps_done(job: Job) -> int:
    """Those of its newest checkpoint, from which it goes on."""
    return max(RunFolder(job.folder).checkpoint_steps(), default=0) if job.state == "resume" else 0


def of_pretraining(config: Pretrain, steps: int, gpus: int) -> Cost:
    with torch.device("meta"):
        model = build_model(config)
    tokens = steps * config.train.batch_size * config.train.sequence_length
    flops = float(tokens * model.flops_per_token(config.train.sequence_length))
    rows = {name for row in config.precision.schedule for name in row.plan.values()}
    rate = PEAK_FLOPS[GPU] * (MFU_BF16 if rows <= UNQUANTISED else MFU_MX)
    hours = flops / rate / 3600 if config.train.compute == "bf16" else None  # in FP32 nobody has measured it
    return Cost(gpus, tokens, flops, hours)


def of_students(config: StudentTeacher, steps: int, gpus: int) -> Cost:
    """Their GPU is waiting more than it computes, so that no rate would say how long."""
    with torch.device("meta"):
        model = build_student(config)
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 2 and p.shape[-2] > 1)  # [replicas, out, in]
    inputs = steps * config.train.batch_size
    return Cost(gpus, inputs * len(config.replicas), 6.0 * weights * inputs)


COSTS: dict[str, Callable[[Any, int, int], Cost]] = {"pretrain": of_pretraining, "student_teacher": of_students}
