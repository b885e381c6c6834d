"""Start the tests' processes from a server that has imported what they need, and forks for each.

There is one server per process. Whoever starts it decides what it imports, so all tests start theirs here.
"""

from __future__ import annotations

import gc
import multiprocessing
from multiprocessing.context import ForkServerContext

from mxstudy.studies import MODULES

PRELOAD = [
    "preloaded",
    "mxstudy.launch.start",
    "mxstudy.train.parallel",
    "torch._inductor",  # train.deterministic imports it
    *MODULES.values(),
    "mxstudy.studies.pretrain.run",
    "mxstudy.students.train",
]


def context() -> ForkServerContext:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    return server


def leave_imports_alone() -> None:
    """Keep the garbage collector away from imported modules, and let it look for garbage less often.

    Looking through modules copies their pages, which takes a quarter of a short run's time. Looking after every 700 new
    objects, as Python does by default, takes a twentieth of the time of a test that composes hundreds of configs.
    """
    gc.freeze()
    gc.set_threshold(50_000)
