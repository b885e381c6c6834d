"""What a launcher prints, once for all processes that were started together.

It has a file of its own because the processes of jobs import it: their copy of the code has no conf/, which the names
of arms in a sweep's tables are read from.
"""

from __future__ import annotations

from mxstudy.distributed import is_first


def say(line: str) -> None:
    if is_first():
        print(line, flush=True)
