"""What a launcher prints, once for all processes that were started together.

It is a file of its own because jobs import it. A job's copy of the code has no conf/, from which the names of arms are
read, so this file imports nothing that needs conf/.
"""

from __future__ import annotations

from mxstudy.distributed import is_first


def say(line: str) -> None:
    if is_first():
        print(line, flush=True)
