"""Whether a checkpoint can be asked, and what it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mxstudy.config import Evaluate
from mxstudy.evaluation import checkpoints, questions
from mxstudy.studies.of_checkpoint import check_model
from mxstudy.train.runtime import resolve_device


def check(config: Evaluate) -> None:
    """That there is such a checkpoint, that norm and precision fit it, and that the questions can be had."""
    check_model(config)
    questions.check(config.evaluation)


def identity_key(config: Evaluate) -> Any:
    return config.checkpoint, config.runs_dir, config.device, str(config.evaluation)


def identity(config: Evaluate) -> tuple[str, dict[str, Any]]:
    device = resolve_device(config.device, "device").type
    path = checkpoints.find(config.checkpoint, Path(config.runs_dir))
    return device, {"checkpoint": checkpoints.identity(path), "questions": questions.identity(config.evaluation)}
