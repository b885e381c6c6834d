"""Whether students and their teacher can be made, and which they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mxstudy.config import StudentTeacher
from mxstudy.model.linear import NormLinear
from mxstudy.model.precision import apply_precision, check_starts, has_token_blocks
from mxstudy.model.teacher import Teacher
from mxstudy.numerics.formats import FORMATS
from mxstudy.reader import ConfigError, require
from mxstudy.train.runtime import resolve_device
from mxstudy.train.stack import build_student, quantized


def check(config: StudentTeacher) -> None:
    """Everything that can be wrong and be known before the run: raises ConfigError."""
    device = resolve_device(config.train.device)
    precision, train = config.precision, config.train
    try:
        with torch.device("meta"):
            model = build_student(config)
            teacher = Teacher(config.teacher.kind, config.model, quantized(config))
    except ConfigError as error:  # the model does not know where its options stand
        is_students = str(error).partition(":")[0] in vars(config.student)
        raise ConfigError(f"student.{error}" if is_students else str(error)) from None
    check_starts(precision, train.steps)
    for row in precision.schedule:
        apply_precision(model, precision, row.from_step, train.compute, device)
        check_gain(model, config.student.gain)
        if config.teacher.quantized:
            check_teacher(teacher, config, row.from_step, device)
        require(
            train.batch_size % precision.block_size == 0 or not any(has_token_blocks(m) for m in model.modules()),
            f"train.batch_size: {train.batch_size} samples do not divide into blocks of {precision.block_size}",
        )


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
            fmt = linear.gemms.forward_w or linear.gemms.forward_x
            require(
                fmt is not None and linear.gemms.scaling == "block" and FORMATS[fmt].scale == "E8M0",
                f"student.gain: mx takes blocks from the forward of {name}, which has none in an MX format; "
                "take bf16 or fp32",
            )


def identity_key(config: StudentTeacher) -> Any:
    return config.train.device


def identity(config: StudentTeacher) -> tuple[str, dict[str, Any]]:
    """Kind of device; there is no corpus."""
    return resolve_device(config.train.device).type, {}
