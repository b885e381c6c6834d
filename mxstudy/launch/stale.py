"""The check that a run which a sweep would skip, or resume, was made by the code of today.

Files are compared always. Versions of torch and Triton and the kind of GPU only as far as the process that plans can
know those of the job: it may be on a login node without a GPU.
"""

from __future__ import annotations

from mxstudy.config import AnyRun
from mxstudy.reader import ConfigError
from mxstudy.tracking.code import changes
from mxstudy.tracking.folder import DONE, RunFolder
from mxstudy.tracking.provenance import provenance
from mxstudy.train.runtime import is_planned

# By what would happen to the run, what stale=ok does.
TAKES = {"skip": "takes its result as it is", "resume": "goes on with today's code"}


def check_code(folder: RunFolder, config: AnyRun, state: str, device_type: str) -> None:
    """Raise ConfigError, with what changed, for a run that other code has made; `state`: that of its job.

    A run without a checkpoint begins again, so nothing of it is stale.
    """
    if config.stale == "ok" or not (state in DONE or (state == "resume" and folder.checkpoint_steps())):
        return
    if changed := changes_since(folder, config.study, device_type):
        what = TAKES["skip" if state in DONE else "resume"]
        raise ConfigError(
            f"stale: there is a run of other code ({'; '.join(changed)}); rerun=true trains it again, stale=ok {what}"
        )


def changes_since(folder: RunFolder, study: str, device_type: str) -> list[str]:
    """Return what differs between the code of that run and that of a job which is planned now."""
    return changes(folder.provenance(), provenance(), study, on_gpu=device_type == "cuda", here=not is_planned())
