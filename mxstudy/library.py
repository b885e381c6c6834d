"""Provide the functions of a notebook besides numerics, norms and results: a command's config, its model, its runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

from mxstudy.cli import through_hydra
from mxstudy.config import AnyRun, Pretrain, read_run
from mxstudy.config.launcher import Launcher
from mxstudy.launch.composed import Composed
from mxstudy.launch.start import Launched, launch
from mxstudy.model.decoder import Decoder
from mxstudy.reader import ConfigError, require
from mxstudy.studies.pretrain.run import initial_model
from mxstudy.train.loop import set_precision
from mxstudy.train.runtime import configure_torch, resolve_device


def compose(*words: str) -> AnyRun:
    """Return the frozen config of the run that `python -m mxstudy WORDS` would start.

    Raises ConfigError for words that start no run, or more than one.
    """
    found: list[Composed] = []

    def take(composed: Callable[[], list[Composed]], launcher: Launcher) -> int:
        found.extend(composed())
        return 0

    hand_over(words, take)
    require(len(found) == 1, f"{' '.join(words)}: starts {len(found)} runs; give each key one value")
    values = found[0].values
    if isinstance(values, ConfigError):
        raise values
    return read_run(values)


def build_model(config: AnyRun) -> Decoder:
    """Return the decoder of a pre-training before its first step, on the device of `train.device`.

    It has the initial weights of the run's seed, and the formats and backends of the schedule's first row. Stochastic
    roundings are those of step 0, until `mxstudy.model.random_streams.move_to` sets another step. Raises ConfigError
    for other runs.
    """
    if not isinstance(config, Pretrain):
        raise ConfigError(f"study: {config.study} has no decoder of its own; compose an experiment of study=pretrain")
    device = resolve_device(config.train.device)
    configure_torch(config.train.compile, config.train.deterministic)
    model = initial_model(config, device)
    set_precision(model, config, 0, device)
    return model


def run(*words: str) -> list[Path]:
    """Do what `python -m mxstudy WORDS` does, in this process, and return its runs' folders.

    `mxstudy.results.load` reads them. What is finished is skipped, and its folder is returned. An interrupted run ends
    after its step, and the same call continues it. Raises ConfigError for words that start no run, and RuntimeError if
    a run failed; one that diverged has a result.
    """
    launched: list[Launched] = []

    def take(composed: Callable[[], list[Composed]], launcher: Launcher) -> int:
        launched.append(launch(composed, launcher))
        return 0

    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("mxstudy.run: called in another thread than the main one, which alone can be interrupted")
    hand_over(words, take)
    ((code, jobs),) = launched
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"{' '.join(words)}: ended with exit code {code}; what it printed says why")
    return [job.folder for job in jobs]


def hand_over(words: tuple[str, ...], take: through_hydra.Take) -> None:
    """Compose the jobs of a command and pass them to `take`. Raises ConfigError for a word that is not an override."""
    for word in words:
        advice = "is an option of the command line; here are only GROUP=CHOICE and KEY=VALUE"
        require(not word.startswith("-"), f"{word}: {advice}")
    through_hydra.hand_over(words, take)
