"""Whether students and their teacher can be made, and which they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mxstudy.config import StudentTeacher
from mxstudy.model.backends import backends_of
from mxstudy.model.linear import NormLinear
from mxstudy.model.precision import apply_precision, check_starts, check_tokens
from mxstudy.model.teacher import Teacher
from mxstudy.numerics.formats import is_random
from mxstudy.reader import ConfigError, require
from mxstudy.tracking.arms import all_backends, backends_by_step
from mxstudy.train.runtime import resolve_device
from mxstudy.train.stack import apply_run_precision, build_student, quantized

# The backends of what `check_models` has passed: stacks that differ in seeds and rates have the same.
_passed: dict[str, str | None] = {}


def check(config: StudentTeacher) -> None:
    """Everything that can be wrong and be known before the run: raises ConfigError."""
    backend(config)


def backend(config: StudentTeacher, device: torch.device | None = None) -> str | None:
    """Return the backends of the students' blocks, over all rows of the schedule; raises ConfigError as `check_models`.

    `device`: the config's own if not given.
    """
    device = device or resolve_device(config.train.device)
    models = config.model, config.norm, config.precision, config.student, config.teacher
    parts = repr((*models, config.train, len(config.replicas), device))
    if parts not in _passed:
        _passed[parts] = check_models(config, device)
    return _passed[parts]


def check_models(config: StudentTeacher, device: torch.device) -> str | None:
    """Check what models, precision and train decide alone; returns the backends of the students' blocks."""
    precision, train = config.precision, config.train
    try:
        with torch.device("meta"):
            model = build_student(config)
            teacher = Teacher(config.teacher.kind, config.model, quantized(config))
    except ConfigError as error:  # the model does not know where its options stand
        is_students = str(error).partition(":")[0] in vars(config.student)
        raise ConfigError(f"student.{error}" if is_students else str(error)) from None
    check_starts(precision, train.steps)
    backends: list[tuple[int, str | None]] = []
    for row in precision.schedule:
        apply_run_precision(model, config, row.from_step, device)
        backends.append((row.from_step, all_backends(backends_of(model).values())))
        check_gain(model, config.student.gain)
        if config.teacher.quantized:
            check_teacher(teacher, config, row.from_step, device)
        check_tokens(model, f"train.batch_size: {train.batch_size} samples", train.batch_size)
    return backends_by_step(backends)


def check_teacher(teacher: Teacher, config: StudentTeacher, step: int, device: torch.device) -> None:
    """It is of other sizes than the student."""
    try:
        apply_precision(teacher.mlp, config.precision, step, config.train.compute, device)
    except ConfigError as error:
        raise ConfigError(f"teacher.quantized: in the teacher {error}") from None


def check_gain(model: nn.Module, gain: str) -> None:
    """A gain in MX takes its format from the forward, which has to have blocks with scales of powers of two."""
    for name, linear in model.named_modules():
        if gain == "mx" and isinstance(linear, NormLinear):
            cast = linear.gain_cast
            require(
                cast is not None and cast.scale == "E8M0" and not is_random(cast),
                f"student.gain: mx takes blocks from the forward of {name}, which has none in an MX format, or rounds "
                "them at random; take bf16 or fp32",
            )


def identity_key(config: StudentTeacher) -> Any:
    return config.train.device


def identity(config: StudentTeacher) -> tuple[str, dict[str, Any]]:
    """Kind of device; there is no corpus."""
    return resolve_device(config.train.device).type, {}
