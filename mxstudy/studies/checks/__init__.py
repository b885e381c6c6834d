"""What is known of a run before it begins, by kind: planning hundreds of runs imports this, and nothing that trains.

Each has `check`, that it can run; `identity`, which its fingerprint takes; and `identity_key`, what that depends on.
Those of a checkpoint have `pinned`, which names it.
"""

from mxstudy.studies.kinds import Kinds

CHECKS = Kinds(__name__)
