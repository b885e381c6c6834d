"""The checks that a sweep can take a run which exists: to skip it, or to go on with it.

The run must have the data that is asked for, and have been made by the code of today. Files are compared always.
Versions of torch and Triton and the kind of GPU only as far as the process that plans can know those of the job: it may
be on a login node without a GPU.
"""

from __future__ import annotations

from mxstudy.config import AnyRun
from mxstudy.reader import ConfigError
from mxstudy.studies import study_of
from mxstudy.tracking.code import changes
from mxstudy.tracking.folder import DONE, RunFolder
from mxstudy.tracking.provenance import provenance
from mxstudy.train.runtime import is_planned

STALE = "stale: "  # how the refusal of a run of other code begins, which many jobs of a sweep may share
AGAIN = "stale=rerun trains it again"
LATER = "+experiment=olmes evaluates its checkpoints, +experiment=generate continues a prompt with them"
# By what would happen to the run, what stale=ok does.
TAKES = {"skip": "takes its result as it is", "resume": "goes on with today's code"}


def is_refused(folder: RunFolder, config: AnyRun, state: str, device_type: str) -> bool:
    """Return whether a check below refuses the run, or its config cannot be read; `state`: that of its job."""
    try:
        check_data(folder, config)
        check_code(folder, config, state, device_type)
    except ConfigError:
        return True
    return False


def check_data(folder: RunFolder, config: AnyRun) -> None:
    """Raise ConfigError for a run without data that `config` asks for, or if the run's own config cannot be read."""
    study, then = study_of(config.study), folder.config()
    for probe in study.off_then(then, config):
        raise ConfigError(f"{probe}: was off in {folder.path}, so that run has no data of it; {AGAIN}")
    for name in study.asked_otherwise(then, config):
        raise ConfigError(f"{name}: differs in {folder.path}; {LATER}, {AGAIN}")


def check_code(folder: RunFolder, config: AnyRun, state: str, device_type: str) -> None:
    """Raise ConfigError, with what changed, for a run that other code has made; `state`: that of its job.

    A run without a checkpoint begins again, so nothing of it is stale.
    """
    if config.stale == "ok" or not (state in DONE or (state == "resume" and folder.checkpoint_steps())):
        return
    if changed := changes_since(folder, config.study, device_type):
        what = TAKES["skip" if state in DONE else "resume"]
        raise ConfigError(f"{STALE}there is a run of other code ({'; '.join(changed)}); {AGAIN}, stale=ok {what}")


def changes_since(folder: RunFolder, study: str, device_type: str) -> list[str]:
    """Return what differs between the code of that run and that of a job which is planned now."""
    return changes(folder.provenance(), provenance(), study, on_gpu=device_type == "cuda", here=not is_planned())
