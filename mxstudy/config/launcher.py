"""Where jobs run: the settings behind hydra/launcher=inline, local or slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from mxstudy.reader import ConfigError, read, require, schema, suggest


@schema
class Inline:
    """One job after another in the process that was started; it ends with the last of them."""

    kind: Literal["inline"] = "inline"


@schema
class Local:
    """Processes on this machine, started by a queue that outlives the command.

    `gpus_per_node`: of each job; null: one where the machine has any. `array_parallelism`: jobs side by side; null: as
    many as there are GPUs for, one on a CPU. `cpus_per_task`: threads of a process; null: torch's own default.
    `setup`: lines of shell before each.
    """

    kind: Literal["local"] = "local"
    gpus_per_node: int | None = None
    array_parallelism: int | None = None
    cpus_per_task: int | None = None
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least(self, 0, "gpus_per_node")
        at_least(self, 1, "array_parallelism", "cpus_per_task")


@schema
class Slurm:
    """An element of a Slurm array for each job; null: the cluster's own default.

    Pre-training has `nodes` x `gpus_per_node` tasks, one a GPU, or one a node where `gpus_per_node` is 0.
    `signal_delay_s` before its limit `time_min` a job saves and is requeued: longer than a step and a checkpoint take.
    `array_parallelism`: jobs side by side. `sbatch`: further options, as on its command line. `setup`: lines of shell.
    """

    kind: Literal["slurm"] = "slurm"
    partition: str | None = None
    account: str | None = None
    nodes: int = 1
    gpus_per_node: int = 1
    cpus_per_task: int | None = None
    memory_gb: float | None = None
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
            f"signal_delay_s: {self.signal_delay_s} s before the limit is before the start of {self.time_min} minutes",
        )
        for option in self.sbatch:
            require(
                re.fullmatch(r"--[a-z][a-z-]*(=.+)?", option) is not None,
                f"sbatch: {option!r} is not an option; write --NAME or --NAME=VALUE",
            )

    @property
    def sbatch_options(self) -> dict[str, Any]:
        """By name; True where one has no value."""
        split = [option.removeprefix("--").partition("=") for option in self.sbatch]
        return {name: value if equals else True for name, equals, value in split}


Launcher = Inline | Local | Slurm
LAUNCHERS: dict[str, type[Launcher]] = {"inline": Inline, "local": Local, "slurm": Slurm}


def read_launcher(values: Mapping[str, Any]) -> Launcher:
    """hydra.launcher, as plain data, to its settings. Raises ConfigError."""
    kind = values.get("kind")
    if kind not in LAUNCHERS:
        raise ConfigError(f"hydra.launcher.kind: {kind!r} is not a choice; {suggest(str(kind), LAUNCHERS)}")
    settings: Launcher = read(LAUNCHERS[kind], values, "hydra.launcher")
    return settings


def at_least(settings: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(value is None or value >= least, f"{name}: must be at least {least}, not {value}")
