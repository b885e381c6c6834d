"""What is known of a run before it begins, by kind: planning hundreds of runs imports this, and nothing that trains.

Each has `check`, that it can run; `identity`, which its fingerprint takes; and `identity_key`, what that depends on.
Those that run a model have `backend`: on which backends its blocks run, by config and device alone. Those of a
checkpoint have `pinned`, which names it.
"""

from typing import Any

from mxstudy.studies.kinds import Kinds

CHECKS = Kinds(__name__)


def backend_of(config: Any) -> str | None:
    """Return the backends on which the blocks of that run's model run, 'joined, reference'; None without a model.

    Raises ConfigError where an explicit one cannot be had.
    """
    known = CHECKS[config.study]
    return known.backend(config) if hasattr(known, "backend") else None
