"""What a kind of run is: one class, whose methods are called in the order in which they stand here.

plan        check, pinned, identity_key, identity, backends, cost       nothing is written, nothing trained
run         run                                                         in the run's folder, and nowhere else
afterwards  summarise, tell_others                                      of all runs of a sweep; of one run
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

from mxstudy.config import Run
from mxstudy.reader import changed
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.sweep import Summary
from mxstudy.train.runtime import is_planned, resolve_device

C = TypeVar("C", bound=Run)
Identity = tuple[str, dict[str, Any]]  # type of the device, and what else a fingerprint hashes beside the config


class Uses(Enum):
    """How a kind of run uses the GPUs of a job."""

    TASK_EACH = "a process for each GPU, of any number of nodes"
    ONE_TASK = "one process that shares the work among the GPUs of its node"
    ONE_GPU = "one process and at most one GPU"


@dataclass(frozen=True)
class Cost:
    """What a run costs, or a step of it. A value that is not known is None.

    samples: tokens of a decoder, inputs of students, counted for every replica. flops: of the forward and the backward
    pass. gpu_hours: at the rate that was measured on a GPU.
    """

    samples: float | None = None
    flops: float | None = None
    gpu_hours: float | None = None

    def __add__(self, other: Cost) -> Cost:
        """Sum the costs of two runs; a value that is not known counts as 0."""
        return Cost(*((getattr(self, f.name) or 0) + (getattr(other, f.name) or 0) for f in fields(Cost)))

    def __mul__(self, steps: int) -> Cost:
        """Return the cost of so many steps."""
        values = (getattr(self, f.name) for f in fields(Cost))
        return Cost(*(None if value is None else value * steps for value in values))


class Study(ABC, Generic[C]):
    """A kind of run. What a kind does not need, it leaves as it is here."""

    uses: ClassVar[Uses] = Uses.ONE_GPU

    @abstractmethod
    def check(self, config: C, ranks: int = 1) -> None:
        """Raise ConfigError for anything that is wrong and can be known before a run over so many ranks."""

    def pinned(self, config: C) -> C:
        """Return the config as it is hashed: names are resolved that may mean something else when the run begins."""
        return config

    def identity_key(self, config: C) -> Hashable:
        """Return what `identity` depends on, which is then asked once for all jobs that share it."""
        return None

    @abstractmethod
    def identity(self, config: C) -> Identity:
        """Return the device's type, and what a fingerprint hashes beside the config: the corpus, a checkpoint."""

    def backends(self, config: C) -> str | None:
        """Return the backends of the model's blocks, for example "fused, reference"; None for a run without a model.

        Raises ConfigError if an explicit `precision.backend` cannot be had.
        """
        return None

    def cost(self, config: C, done: int) -> Cost:
        """Return the cost of the training steps that are left after the first `done`; nothing if it does not train."""
        return Cost()

    @abstractmethod
    def run(self, config: C, folder: RunFolder, label: str) -> str:
        """Run, or go on where the folder's run was interrupted; returns its state."""

    @abstractmethod
    def summarise(self, arms: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        """Print and return what came out of a sweep's runs, by label."""

    def tell_others(self, config: C, folder: RunFolder) -> str | None:
        """Tell the tracking server's other runs what this one found out; returns why that failed, in one line."""
        return None


T = TypeVar("T")


def on_planned_device(part: T, key: str = "train.device") -> T:
    """Return a part of a config with the type of the device that its job will have, if another process runs it."""
    if not is_planned():
        return part
    return changed(part, device=resolve_device(part.device, key).type)  # type: ignore[attr-defined]
