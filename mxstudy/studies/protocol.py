"""The interface of a kind of run: one class, whose methods are called in the order of their definition here.

plan        check, pinned, identity_key, identity, backends, cost       write nothing and train nothing
run         run                                                         writes in the run's folder and nowhere else
afterwards  summarise, tell_others                                      for all runs of a sweep; for one run
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from mxstudy.config import Run
from mxstudy.config.model import AnyNorm, Precision
from mxstudy.config.settings import vain_settings
from mxstudy.reader import changed
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary
from mxstudy.train.runtime import is_planned, resolve_device

C = TypeVar("C", bound=Run)
Identity = tuple[str, dict[str, Any]]  # the device's type, and what else a fingerprint hashes besides the config


class Uses(Enum):
    """How a kind of run uses the GPUs of a job."""

    TASK_EACH = "a process for each GPU, of any number of nodes"
    ONE_TASK = "one process that shares the work among the GPUs of its node"
    ONE_GPU = "one process and at most one GPU"


@dataclass(frozen=True)
class Cost:
    """The cost of a run, or of one of its steps. An unknown value is None.

    samples: tokens of a decoder, or inputs of students, counted for every replica. flops: of forward and backward.
    gpu_hours: at the rate measured on a GPU.
    """

    samples: float | None = None
    flops: float | None = None
    gpu_hours: float | None = None

    def __add__(self, other: Cost) -> Cost:
        """Return the sum of two costs; an unknown value counts as 0."""
        return Cost(*((getattr(self, f.name) or 0) + (getattr(other, f.name) or 0) for f in fields(Cost)))

    def __mul__(self, steps: int) -> Cost:
        """Return the cost of `steps` such steps."""
        values = (getattr(self, f.name) for f in fields(Cost))
        return Cost(*(None if value is None else value * steps for value in values))


class Study(ABC, Generic[C]):
    """A kind of run; a subclass overrides only the methods that it needs."""

    uses: ClassVar[Uses] = Uses.ONE_GPU

    @abstractmethod
    def check(self, config: C, ranks: int = 1) -> None:
        """Raise ConfigError for anything that is wrong and can be known before a run on this number of ranks."""

    def pinned(self, config: C) -> C:
        """Return the config to be hashed, with names resolved that may mean something else when the run begins."""
        return config

    def identity_key(self, config: C) -> Hashable:
        """Return what `identity` depends on; `identity` is called once for all jobs with the same key."""
        return None

    @abstractmethod
    def identity(self, config: C) -> Identity:
        """Return the device's type, and what a fingerprint hashes besides the config, such as corpus or checkpoint."""

    def backends(self, config: C) -> str | None:
        """Return the backends of the model's blocks, for example "fused, reference"; None for a run without a model.

        Raises ConfigError if an explicit `precision.backend` cannot run the model.
        """
        return None

    def vain_settings(self, config: C) -> dict[str, str]:
        """Return {config key: message that says why} for each precision setting that has no effect in this run."""
        return {}

    def cost(self, config: C, done: int) -> Cost:
        """Return the cost of the training steps after the first `done`; an empty cost if the run does not train."""
        return Cost()

    @abstractmethod
    def run(self, config: C, folder: RunFolder, label: str) -> str:
        """Run, or resume the folder's run where it was interrupted; returns the run's state."""

    @abstractmethod
    def summarise(self, arms: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        """Print and return the results of a sweep's runs; `arms` is {label: folder}."""

    def tell_others(self, config: C, folder: RunFolder) -> str | None:
        """Add this run's results to other runs on the tracking server; returns None, or one line on why it failed."""
        return None


def settings_in_vain(precision: Precision, norm: AnyNorm | None) -> dict[str, str]:
    """Return the result of `Study.vain_settings` for a model with this precision and norm."""
    unused = vain_settings(precision, () if norm is None else norm.reads)
    return {f"precision.{vain.setting}": vain.message for vain in unused}


T = TypeVar("T")


@dataclass(frozen=True)
class Keyed(Generic[T]):
    """A value that equals any other with the same key, so that `functools.cache` keeps one result for all of them.

    Why: configs have dicts in them and cannot be hashed, and most checks read only a part of a config.
    """

    key: Hashable
    value: T = field(compare=False)


def on_planned_device(part: T, key: str = "train.device") -> T:
    """Return `part` with its job's device type as `device` if another process will run the job, else unchanged."""
    if not is_planned():
        return part
    return changed(part, device=resolve_device(part.device, key).type)  # type: ignore[attr-defined]
