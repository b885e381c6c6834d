"""The processes that a queue starts: `python -m mxstudy.launch work RUN_FOLDER`, or `queue LAUNCH_FOLDER`."""

import sys
from pathlib import Path

from mxstudy.launch import local, worker
from mxstudy.tracking.folder import RunFolder


def main(what: str, folder: str) -> int:
    if what == "queue":
        local.run_queue(Path(folder))
        return 0
    return int(worker.work(RunFolder(Path(folder))) == "failed")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
