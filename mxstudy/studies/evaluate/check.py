"""Whether a checkpoint can be asked, and what it is asked."""

from __future__ import annotations

from typing import Any

from mxstudy.config import Evaluate
from mxstudy.evaluation import questions
from mxstudy.studies.trained_model import backend as backend
from mxstudy.studies.trained_model import check_model, identity_of
from mxstudy.studies.trained_model import pinned as pinned


def check(config: Evaluate) -> None:
    """That there is such a checkpoint, that norm and precision fit it, and that the questions can be had."""
    check_model(config)
    questions.check(config.evaluation)


def identity_key(config: Evaluate) -> Any:
    return config.checkpoint, config.runs_dir, config.device, str(config.evaluation)


def identity(config: Evaluate) -> tuple[str, dict[str, Any]]:
    return identity_of(config, questions=questions.identity(config.evaluation))
