"""The interface of a kind of run: one class.

plan        check, pinned, backends, unused_settings, identity_key, identity        no file, no training
            cost, model_notes, precision_plan, gpu_hours_note, recomputation         for a dry run
            watched, check_watched, newly_on, with_watched_of, changed_questions     what is measured beside the run
run         run                                                                     writes in the run's folder alone
afterwards  summarise, tell_others                                                  for all runs of a sweep; for one run
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from mxstudy.config import Run
from mxstudy.config.evaluation import EvaluationDuringTraining
from mxstudy.config.model import AnyNorm
from mxstudy.config.observation import Probes, Scheduled
from mxstudy.config.precision_plan import Precision
from mxstudy.config.settings import reads_of_gain, unused_settings
from mxstudy.config.student import StudentProbes
from mxstudy.config.texts import TextsDuringTraining
from mxstudy.reader import changed, require
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mlflow_parent import Summary
from mxstudy.train.runtime import is_planned, resolve_device

C = TypeVar("C", bound=Run)
PROBE = "probe."
Watched = Scheduled | EvaluationDuringTraining | TextsDuringTraining
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

    def __mul__(self, steps: int) -> Cost:
        """Return the cost of `steps` such steps."""
        values = (getattr(self, f.name) for f in fields(Cost))
        return Cost(*(None if value is None else value * steps for value in values))


class Study(ABC, Generic[C]):
    """A kind of run; a subclass overrides only the methods that it needs."""

    uses: ClassVar[Uses] = Uses.ONE_GPU
    shows_again: ClassVar[bool] = False  # whether a skipped run, if it is the only one, shows its results again

    @abstractmethod
    def check(self, config: C, ranks: int = 1) -> None:
        """Raise ConfigError for any error that can be found before a run on this number of ranks."""

    def pinned(self, config: C) -> C:
        """Return the config to hash; names that may mean something else when the run begins are resolved."""
        return config

    def identity_key(self, config: C) -> Hashable:
        """Return the values that `identity` depends on; it is called once for all jobs with the same key."""
        return None

    @abstractmethod
    def identity(self, config: C) -> Identity:
        """Return the device's type, and the inputs that a fingerprint hashes, such as corpus or checkpoint."""

    def backends(self, config: C) -> str | None:
        """Return the backends of the model's blocks, for example "fused, reference", or None for a run without a model.

        Raises ConfigError if an explicit `precision.backend` cannot run the model.
        """
        return None

    def unused_settings(self, config: C) -> dict[str, str]:
        """Return {config key: message that says why} for each setting that has no effect in this run.

        Only for those that an experiment or a rehearsal may set all the same, and a command may not: of the precision,
        of probes. Also for one that has its default.
        """
        return {}

    def watched(self, config: C) -> dict[str, Watched]:
        """Return the measurements with a schedule of their own, by config key: probes, evaluation, texts."""
        return {}

    def check_watched(self, config: C) -> None:
        """Raise ConfigError for a setting of a measurement that is off.

        Only when a run is planned: a stored config is read back as it was trained.
        """
        for key, part in self.watched(config).items():
            check_off(key, part)

    def newly_on(self, then: C, now: C) -> list[str]:
        """Return the keys of the measurements that are on in `now` and off in the run's earlier config `then`.

        A probe's option that measures more, such as `probe.gradient_bias.by_operand`, counts as a measurement if it has
        something to measure in this run.
        """
        earlier, watched = self.watched(then), self.watched(now)
        parts = [key for key, part in watched.items() if part.every_steps and not earlier[key].every_steps]
        more = [f"{key}.{name}" for key, part in watched.items() for name in more_in(part, earlier[key])]
        return parts + [key for key in more if key not in self.unused_settings(now)]

    def with_watched_of(self, then: C, now: C) -> C:
        """Return config `now` with all measurements of the earlier config `then`, which other sweeps still want."""
        watched, earlier = self.watched(now), self.watched(then)
        on = {key: part for key, part in earlier.items() if part.every_steps and not watched[key].every_steps}
        for key, part in watched.items():
            if part.every_steps and (more := more_in(earlier[key], part)):
                on[key] = changed(part, **dict.fromkeys(more, True))
        probes = {key.removeprefix(PROBE): part for key, part in on.items() if key.startswith(PROBE)}
        parts: dict[str, Any] = {key: part for key, part in on.items() if not key.startswith(PROBE)}
        if probes:
            parts["probe"] = changed(now.probe, **probes)  # type: ignore[attr-defined]  # it has what it watches
        return changed(now, **parts)

    def changed_questions(self, then: C, now: C) -> list[str]:
        """Return the keys of evaluation questions in which two configs of the same run differ."""
        return []

    def cost(self, config: C, done: int) -> Cost:
        """Return the cost of the training steps after the first `done`; an empty cost if the run does not train."""
        return Cost()

    def model_notes(self, config: C) -> list[str]:
        """Return lines for a dry run: the model's size; which blocks do not run on the fastest backend, and why."""
        return []

    def precision_plan(self, config: C) -> list[str]:
        """Return lines for a dry run of one job: which linears have which casts, and which backend computes them."""
        return []

    def gpu_hours_note(self, config: C) -> str:
        """Return a sentence for a dry run: at which rate `cost` counts GPU hours, or why it has none."""
        return ""

    def recomputation(self, config: C) -> str:
        """Return a sentence for a dry run: what the backward computes again, which `cost` does not count."""
        return ""

    @abstractmethod
    def run(self, config: C, folder: RunFolder, label: str) -> str:
        """Run, or resume the folder's run where it was interrupted, and return the run's state."""

    @abstractmethod
    def summarise(self, runs: Mapping[str, RunFolder], baseline: Mapping[str, str]) -> Summary:
        """Print and return the results of a sweep's runs; `runs` is {name of the arm, and seeds: folder}."""

    def tell_others(self, config: C, folder: RunFolder) -> str | None:
        """Add this run's results to other runs on the tracking server. Return None, or one line on why it failed."""
        return None


def unused_messages(precision: Precision, norm: AnyNorm | None, gain: str | None) -> dict[str, str]:
    """Return {config key: message} for each setting of this precision without effect in a model with this norm.

    `gain`: how the norm's gains are rounded.
    """
    unused = unused_settings(precision, (*(() if norm is None else norm.reads), *reads_of_gain(gain)))
    return {f"precision.{one.setting}": one.message for one in unused}


def lines_by_step(plans: Sequence[tuple[int, str]]) -> list[str]:
    """Return the lines of the plans of a schedule, below the step from which each applies if there are several."""
    several = len(plans) > 1
    return [line for step, plan in plans for line in [*([f"from step {step}:"] if several else []), *plan.splitlines()]]


def probes_of(section: Probes | StudentProbes) -> dict[str, Watched]:
    """Return the probes of a config by their keys."""
    return {f"{PROBE}{name}": probe for name, probe in vars(section).items()}


def more_in(part: Watched, other: Watched) -> list[str]:
    """Return the options of a probe by which it measures more, true or false, that are on in `part` and off in `other`.

    Evaluations and texts have none.
    """
    options = vars(part).items() if isinstance(part, Scheduled) else ()
    return [name for name, value in options if value is True and not getattr(other, name)]


def check_off(key: str, part: Watched) -> None:
    """Raise ConfigError for a setting that is not at its default while the part is off."""
    unset = vars(type(part)())
    for name, value in vars(part).items() if not part.every_steps else ():
        require(value == unset[name], f"{key}.{name}: has no effect while {key} is off; set {key}.every_steps too")


T = TypeVar("T")
D = TypeVar("D", bound="HasDevice")


@dataclass(frozen=True)
class Keyed(Generic[T]):
    """A value that equals any other with the same key, so that `functools.cache` keeps one result for all of them.

    Why: configs have dicts in them and cannot be hashed, and most checks read only a part of a config.
    """

    key: Hashable
    value: T = field(compare=False)


class HasDevice(Protocol):
    """A frozen config with a field `device`."""

    @property
    def device(self) -> str: ...


def on_planned_device(part: D, key: str = "train.device") -> D:
    """Return `part` with its job's device type as `device` if another process will run the job, else unchanged."""
    if not is_planned():
        return part
    return changed(part, device=resolve_device(part.device, key).type)
