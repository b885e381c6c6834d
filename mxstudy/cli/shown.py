"""Show the config that each job of a command would get, with the meaning of each key, and run nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from mxstudy.config import Launcher, read_run
from mxstudy.help.answers import commented
from mxstudy.launch.composed import Composed
from mxstudy.launch.labels import labels
from mxstudy.launch.refusal import refusal
from mxstudy.reader import ConfigError, require
from mxstudy.small_files import yaml_of

CFG = ("-c", "--cfg")
VIEWS = "--cfg job prints the config of each run, --cfg hydra the settings of Hydra"


def without_cfg(arguments: Sequence[str]) -> list[str] | None:
    """Return a command without `--cfg job`, or None if it does not have this option.

    Raises ConfigError for a view other than `job` and `hydra`. `--cfg all` would show what no run gets: the name of the
    experiment, the corpora of a blend and the changes of a rehearsal are added after Hydra has composed.
    """
    words = [part for word in arguments for part in (word.split("=") if word.partition("=")[0] in CFG else [word])]
    for at, (option, value) in enumerate(pairwise(words)):
        if option in CFG and value != "hydra":
            require(value == "job", f"{option} {value}: no such view; {VIEWS}")
            return [word for word in words[:at] + words[at + 2 :] if word != "--resolve"]  # all references are
    return None


def show(compose: Callable[[], list[Composed]], launcher: Launcher) -> int:
    """Print the config of each job as a YAML document, and return 0. Raises ConfigError if the schema refuses one.

    What a plan finds out with torch, a corpus or a checkpoint is left to dry_run=true, which takes seconds.
    """
    jobs = compose()
    names, errors = labels(jobs), defaultdict[str, list[str]](list)
    configs = []
    for job, name in zip(jobs, names, strict=True):
        try:
            configs.append(checked(job))
        except ConfigError as error:
            errors[str(error)].append(name)
    require(not errors, refusal(errors, len(jobs)))
    for job, name, config in zip(jobs, names, configs, strict=True):
        head = [f"--- # {' '.join(name.split())}"] if len(jobs) > 1 else []
        print(*head, *(f"# {note}" for note in job.notes), commented(yaml_of(config)), sep="\n")
    return 0


def checked(job: Composed) -> dict[str, Any]:
    """Return the config of a job. Raises ConfigError if it has none, or one that no run may have."""
    if isinstance(job.values, ConfigError):
        raise job.values
    read_run(job.values).check_seeds()
    return job.values
