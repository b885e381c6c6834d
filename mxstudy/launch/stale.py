"""Check whether a sweep can use an existing run: skip it, or continue it.

The run must have the data that the config asks for, and must have been made by today's code. Files are always compared.
Versions of torch and Triton and the kind of GPU are compared only if the planning process knows those of the job: it
may be on a login node without a GPU.
"""

from __future__ import annotations

from mxstudy.config import AnyRun
from mxstudy.launch.refusal import STALE
from mxstudy.reader import ConfigError
from mxstudy.studies import study_of
from mxstudy.tracking.code import changes
from mxstudy.tracking.folder import DONE, RunFolder
from mxstudy.tracking.provenance import provenance
from mxstudy.train.runtime import is_planned

RERUN = "stale=rerun trains it again"
LATER = "+experiment=olmes evaluates its checkpoints, +experiment=generate continues a prompt with them"
# From the job's state to what stale=ok does with the run.
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
    for probe in study.newly_on(then, config):
        raise ConfigError(f"{probe}: was off in {folder.path}, so that run has no data of it; {RERUN}")
    for name in study.changed_questions(then, config):
        raise ConfigError(f"{name}: differs in {folder.path}; {LATER}, {RERUN}")


def check_code(folder: RunFolder, config: AnyRun, state: str, device_type: str) -> None:
    """Raise ConfigError, which names the changes, for a run that other code has made; `state`: that of its job.

    A run that keeps neither a checkpoint nor a table begins again, so it is never stale.
    """
    if config.stale == "ok" or not (state in DONE or (state == "resume" and folder.is_begun())):
        return
    if changed := changes_since(folder, config.study, device_type):
        what = TAKES["skip" if state in DONE else "resume"]
        raise ConfigError(f"{STALE}other code made this run ({'; '.join(changed)}); {RERUN}, stale=ok {what}")


def changes_since(folder: RunFolder, study: str, device_type: str) -> list[str]:
    """Return the differences between that run's code and the code of a job that is planned now."""
    return changes(folder.provenance(), provenance(), study, on_gpu=device_type == "cuda", here=not is_planned())
