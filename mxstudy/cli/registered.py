"""What Hydra is told before it composes: the base of every config group, our resolvers, and the sweeps of a command."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from mxstudy import config as schemas
from mxstudy.compat.hydra import reading
from mxstudy.reader import defaults, kinds_of

# The bases of each config group: every YAML file of the group starts from one of them.
BASES: dict[str, dict[str, Any]] = {
    "model": {"decoder": schemas.Decoder, "residual_mlp": schemas.ResidualMLP},
    "norm": kinds_of(get_args(schemas.Norm)),
    "precision": {"precision": schemas.Precision},
    "data": kinds_of(get_args(schemas.TrainingData)),
    "tokenizer": kinds_of(get_args(schemas.Tokenizer)),
    "optimizer": {"adamw": schemas.AdamW, "adam": schemas.Adam, "sgd": schemas.SGD},
    "schedule": {"schedule": schemas.Schedule},
    "train": {"train": schemas.Train, "stack": schemas.StackTrain},
    "teacher": {"teacher": schemas.Teacher},
    "intervention": {"intervention": schemas.Intervention},
    "probe": {"probe": schemas.Probes, "student_probe": schemas.StudentProbes},
    "tracking": {"tracking": schemas.Tracking},
}


def register(sweeps: Path, arguments: Iterable[str]) -> None:
    """Register the bases with Hydra, and only the sweeps that a command line names, because reading all takes 0.3 s."""
    register_bases()
    asked = ",".join(word.partition("=")[2] for word in arguments if word.lstrip("+").startswith("sweep="))
    for path in sweeps.glob("*.yaml") if asked else ():
        if path.stem in asked.split(",") or path.stem.startswith("base_"):
            register_sweep(path)


@functools.cache
def register_sweep(path: Path) -> None:
    with reading(path):
        ConfigStore.instance().store(group="sweep", name=path.stem, node=OmegaConf.load(path), package="_global_")


@functools.cache  # Hydra's store lives as long as the process
def register_bases() -> None:
    """Register with Hydra the base of every group (the schema's defaults), and three resolvers.

    ${times:A,B} multiplies sizes. ${of:STUDY,A,B} is A in that kind of run (`study`) and B in all others.
    ${if_asked:A} is A for an evaluation that is on, else the default of `limit`.
    """
    OmegaConf.register_new_resolver("times", operator.mul, replace=True)
    OmegaConf.register_new_resolver("of", in_kind_of_run, replace=True)
    OmegaConf.register_new_resolver("if_asked", if_asked, replace=True)
    store = ConfigStore.instance().store
    for name, cls in schemas.STUDIES.items():
        store(group="study", name=f"base_{name}", node=defaults(cls), package="_global_")
    for group, bases in BASES.items():
        for name, cls in bases.items():
            store(group=group, name=f"base_{name}", node=defaults(cls))
    ours = {"_target_": "hydra_plugins.mxstudy_launcher.StudyLauncher", "_convert_": "all"}
    for name, settings in schemas.LAUNCHERS.items():
        store(group="hydra/launcher", name=f"base_{name}", node=ours | defaults(settings))


def in_kind_of_run(study: str, value: Any, other: Any, *, _root_: DictConfig) -> Any:
    """Return `value` if the config is of the kind of run `study`, else `other`."""
    return value if _root_.get("study") == study else other


def if_asked(limit: Any, *, _parent_: DictConfig) -> Any:
    """Return `limit` if the evaluation around it asks questions, else the default, as of any setting without effect."""
    return limit if _parent_.get("every_steps", "always") else schemas.EvaluationDuringTraining.limit
