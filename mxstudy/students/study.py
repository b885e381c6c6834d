"""Training students on a fixed teacher as a kind of run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from mxstudy.config import StudentTeacher
from mxstudy.model.describe_precision import describe
from mxstudy.reader import changed
from mxstudy.students.check import backends_on
from mxstudy.students.stack import apply_run_precision, build_student
from mxstudy.studies.protocol import (
    Cost,
    Identity,
    Study,
    Watched,
    lines_by_step,
    on_planned_device,
    probes_of,
    unused_messages,
)
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary
from mxstudy.train.runtime import resolve_device


class StudentTeacherStudy(Study[StudentTeacher]):
    def check(self, config: StudentTeacher, ranks: int = 1) -> None:
        backends_on(config)

    def pinned(self, config: StudentTeacher) -> StudentTeacher:
        return changed(config, train=on_planned_device(config.train))

    def identity_key(self, config: StudentTeacher) -> Hashable:
        return config.train.device

    def identity(self, config: StudentTeacher) -> Identity:
        return resolve_device(config.train.device).type, {}

    def backends(self, config: StudentTeacher) -> str | None:
        return backends_on(config)

    def unused_settings(self, config: StudentTeacher) -> dict[str, str]:
        return unused_messages(config.precision, config.norm, config.student.gain)

    def watched(self, config: StudentTeacher) -> dict[str, Watched]:
        return probes_of(config.probe)

    def cost(self, config: StudentTeacher, done: int) -> Cost:
        """Return the cost of the remaining steps, without GPU hours: the GPU waits more than it computes."""
        with torch.device("meta"):
            model = build_student(config)
        weights = sum(p.numel() for p in model.parameters() if p.dim() > 2 and p.shape[-2] > 1)  # [replicas, out, in]
        inputs = config.train.batch_size
        return Cost(inputs * len(config.replicas), 6.0 * weights * inputs) * (config.train.steps - done)

    def precision_plan(self, config: StudentTeacher) -> list[str]:
        return plan(config)

    def run(self, config: StudentTeacher, folder: RunFolder, label: str) -> str:
        from mxstudy.students.train import run

        return run(config, folder, label)

    def summarise(self, runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        from mxstudy.students.tables import summarise

        return summarise(runs, baseline)


def plan(config: StudentTeacher, device: torch.device | None = None) -> list[str]:
    """Return the lines of the students' precision plan as applied, and how else they and the teacher are rounded.

    `device`: by default the config's own.
    """
    device = device or resolve_device(config.train.device)
    with torch.device("meta"):
        model = build_student(config)
    steps = [row.from_step for row in config.precision.schedule]
    plans = [(step, describe(model, apply_run_precision(model, config, step, device))) for step in steps]
    student, teacher = config.student, "as the students" if config.teacher.quantized else "not quantised"
    of_norms = f"norms: gains in {student.gain}, operations in {student.norm_ops or student.vector_ops}; "
    others = f"other vector operations: in {student.vector_ops}; teacher: {teacher}"
    return [*lines_by_step(plans), (of_norms if config.norm else "") + others]


STUDY = StudentTeacherStudy()
