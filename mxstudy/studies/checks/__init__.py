"""What is known of a run before it begins, by kind: planning hundreds of runs imports this, and nothing that trains.

Each has `check`, that it can run; `identity`, which its fingerprint takes; and `identity_key`, what that depends on.
Those that run a model have `backend`: on which backends its blocks run, by config and device alone. Those of a
checkpoint have `pinned`, which names it.
"""

from pathlib import Path
from typing import Any

from mxstudy.config import OfCheckpoint
from mxstudy.config.settings import vain_settings
from mxstudy.studies.kinds import Kinds

CHECKS = Kinds(__name__)


def backend_of(config: Any) -> str | None:
    """Return the backends on which the blocks of that run's model run, 'joined, reference'; None without a model.

    Raises ConfigError where an explicit one cannot be had.
    """
    known = CHECKS[config.study]
    return known.backend(config) if hasattr(known, "backend") else None


def vain_settings_of(config: Any) -> dict[str, str]:
    """Return by its key each setting of the run's precision that nothing takes, with a message that says why."""
    precision, norm = getattr(config, "precision", None), getattr(config, "norm", None)
    if precision is None or not any(vain_settings(precision)):
        return {}
    if isinstance(config, OfCheckpoint) and norm is None:
        from mxstudy.evaluation import checkpoints  # loads what evaluates

        norm = checkpoints.describe(checkpoints.find(config.checkpoint, Path(config.runs_dir))).norm
    found = vain_settings(precision, () if norm is None else norm.reads)
    return {f"precision.{vain.setting}": vain.message for vain in found}
