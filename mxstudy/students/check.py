"""Check a student-teacher config before it runs: students and teacher can be built and run in its precision."""

from __future__ import annotations

import functools

import torch
from torch import nn

from mxstudy.config import StudentTeacher
from mxstudy.model.backends import backends_of
from mxstudy.model.linear import NormLinear
from mxstudy.model.precision import apply_precision, check_starts, check_tokens
from mxstudy.numerics.formats import is_random
from mxstudy.numerics.vector_ops import along_vector
from mxstudy.probes.gain_casts import check_gain_cast
from mxstudy.reader import ConfigError, require
from mxstudy.students.stack import apply_run_precision, build_student, quantized
from mxstudy.students.teacher import Teacher
from mxstudy.studies.protocol import Keyed
from mxstudy.tracking.mixed_backends import all_backends, backends_by_step
from mxstudy.train.runtime import resolve_device


def backends_on(config: StudentTeacher, device: torch.device | None = None) -> str | None:
    """Return the students' backends over the precision schedule. Raises ConfigError as `check_models` does.

    `device`: by default the config's own.
    """
    models = config.model, config.norm, config.precision, config.student, config.teacher
    read = repr((*models, config.train, len(config.replicas), config.probe.last_bin))
    return check_models(Keyed(read, config), device or resolve_device(config.train.device))


@functools.cache  # stacks that differ only in seeds or learning rates have the same
def check_models(keyed: Keyed[StudentTeacher], device: torch.device) -> str | None:
    """Check models, precision and train against each other. Return the students' backends over the schedule.

    `keyed`: a config by its models, precision, train and `probe.last_bin`, and by the number of replicas. Raises
    ConfigError.
    """
    config = keyed.value
    precision, train = config.precision, config.train
    try:
        with torch.device("meta"):
            model = build_student(config)
            teacher = Teacher(config.teacher.kind, config.model, quantized(config))
    except ConfigError as error:  # the model does not know the config section of its options
        is_students = str(error).partition(":")[0] in vars(config.student)
        raise ConfigError(f"student.{error}" if is_students else str(error)) from None
    check_starts(precision, train.steps)
    backends: list[tuple[int, str | None]] = []
    for row in precision.schedule:
        apply_run_precision(model, config, row.from_step, device)
        backends.append((row.from_step, all_backends(backends_of(model).values())))
        check_gain(model, config.student.gain, config.probe.last_bin.every_steps > 0)
        if config.teacher.quantized:
            check_teacher(teacher, config, row.from_step, device)
        check_tokens(model, f"train.batch_size: {train.batch_size} samples", train.batch_size)
    return backends_by_step(backends)


def check_teacher(teacher: Teacher, config: StudentTeacher, step: int, device: torch.device) -> None:
    """Raise ConfigError if the precision does not fit the teacher, whose sizes differ from the student's."""
    try:
        apply_precision(teacher.mlp, config.precision, step, config.train.compute, device)
    except ConfigError as error:
        raise ConfigError(f"teacher.quantized: in the teacher {error}") from None


def check_gain(model: nn.Module, gain: str, measured: bool) -> None:
    """Raise ConfigError if a gain in MX finds no cast: it uses that of the forward, which must have E8M0 scales.

    `measured`: whether the probe last_bin measures the gains, which must know the cast.
    """
    for name, linear in model.named_modules():
        if gain == "mx" and isinstance(linear, NormLinear):
            cast = linear.gain_cast
            require(
                cast is not None and cast.scale == "E8M0" and not is_random(cast),
                f"student.gain: mx uses the cast of the forward of {name}, which is not in an MX format, or rounds "
                "stochastically; use bf16 or fp32",
            )
            assert cast is not None
            try:
                along_vector(cast)
            except ConfigError as error:
                raise ConfigError(f"student.{error}") from None
            if measured:
                check_gain_cast(name, cast, "student.gain")
