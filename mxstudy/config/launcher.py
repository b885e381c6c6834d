"""The settings of the launchers, which decide where jobs run: hydra/launcher=inline, local or slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from mxstudy.reader import ConfigError, read, require, schema, suggest


@schema
class Inline:
    """Run one job after another in the process that was started, which ends after the last job."""

    kind: Literal["inline"] = "inline"
    nodes: ClassVar[int] = 1


@schema
class Local:
    """Run jobs in processes on this machine, started by a queue that outlives the command.

    `gpus_per_node`: GPUs of each job; null: one if the machine has a GPU. `jobs_per_gpu`: jobs that share a GPU, so
    that one trains while another starts, validates or saves. `array_parallelism`: jobs that run at once; null: as many
    as the GPUs allow, or one on a CPU. `cpus_per_task`: threads of a process; null: one in a rehearsal, its share of
    the cores if several processes run at once, else torch's default. `setup`: shell lines to run before each job.
    """

    kind: Literal["local"] = "local"
    nodes: ClassVar[int] = 1
    gpus_per_node: int | None = None
    jobs_per_gpu: int = 1
    array_parallelism: int | None = None
    cpus_per_task: int | None = None
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, 0, "gpus_per_node")
        at_least(self, 1, "jobs_per_gpu", "array_parallelism", "cpus_per_task")
        require(
            self.jobs_per_gpu == 1 or self.gpus_per_node in (None, 1),
            f"jobs_per_gpu: only jobs of one GPU share it, not of gpus_per_node={self.gpus_per_node}; leave one out",
        )


@schema
class Slurm:
    """Run each job as one element of a Slurm array; a null setting takes the cluster's default.

    Pre-training has `nodes` x `gpus_per_node` tasks, one per GPU, or one per node if `gpus_per_node` is 0. A job saves
    and is requeued `signal_delay_s` before its time limit `time_min`; this must be longer than a step and a checkpoint
    take. `array_parallelism`: jobs that run at once. `sbatch`: further options, written as on its command line.
    `setup`: shell lines to run before each job.
    """

    kind: Literal["slurm"] = "slurm"
    partition: str | None = None  # as in sbatch
    account: str | None = None  # as in sbatch
    nodes: int = 1
    gpus_per_node: int = 1
    cpus_per_task: int | None = None  # as in sbatch
    memory_gb: float | None = None  # memory of each node
    time_min: int = 1440
    array_parallelism: int = 100
    signal_delay_s: int = 120
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, 0, "gpus_per_node")
        at_least(self, 1, "nodes", "cpus_per_task", "time_min", "array_parallelism", "signal_delay_s")
        require(self.memory_gb is None or self.memory_gb > 0, f"memory_gb: must be positive, not {self.memory_gb}")
        require(
            self.signal_delay_s < 60 * self.time_min,
            f"signal_delay_s: must be less than the {self.time_min} minutes of time_min, not {self.signal_delay_s} s",
        )
        for name in ("partition", "account"):
            value = getattr(self, name)
            require(value is None or re.fullmatch(r"\S+", value) is not None, f"{name}: {value!r} is not a name")
        for option in self.sbatch:
            require(
                re.fullmatch(r"--[a-z][a-z-]*(=.+)?", option) is not None,
                f"sbatch: {option!r} is not an option; write --NAME or --NAME=VALUE",
            )

    @property
    def sbatch_options(self) -> dict[str, Any]:
        """Return the options by name, with True for an option without a value."""
        split = [option.removeprefix("--").partition("=") for option in self.sbatch]
        return {name: value if equals else True for name, equals, value in split}


Launcher = Inline | Local | Slurm
LAUNCHERS: dict[str, type[Launcher]] = {"inline": Inline, "local": Local, "slurm": Slurm}


def read_launcher(values: Mapping[str, Any]) -> Launcher:
    """Return the settings that hydra.launcher, as plain data, describes. Raises ConfigError."""
    kind = values.get("kind")
    if kind not in LAUNCHERS:
        raise ConfigError(f"hydra.launcher.kind: {kind!r} is not a choice; {suggest(str(kind), LAUNCHERS)}")
    settings: Launcher = read(LAUNCHERS[kind], values, "hydra.launcher")
    return settings


def at_least(settings: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(value is None or value >= least, f"{name}: must be at least {least}, not {value}")
