"""Hand a command to Hydra, and take the jobs back that our Hydra launcher gets from it."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mxstudy.cli.composing import compose
from mxstudy.cli.registered import register
from mxstudy.compat.hydra import compose_once, map_choices_if_asked, read_files_once
from mxstudy.config import Launcher
from mxstudy.config.conf_folders import CONF, SWEEPS
from mxstudy.explain import explain
from mxstudy.help.group_choices import groups
from mxstudy.launch.composed import Composed
from mxstudy.launch.process_pool import begin_in_processes
from mxstudy.reader import ConfigError
from mxstudy.words import HYDRA_ONLY, MULTIRUN, as_text, check_words

Take = Callable[[Callable[[], list[Composed]], Launcher], int]  # from the composer of the jobs to an exit code
_take: ContextVar[Take | None] = ContextVar("take", default=None)  # Hydra passes on no argument of its caller


def hand_over(arguments: Sequence[str], take: Take | None = None) -> None:
    """Have Hydra read a command and hand its jobs to `take`, which returns an exit code; by default they are launched.

    Raises ConfigError, which says what is wrong with the command.
    """
    arguments = list(map(as_text, arguments))
    check_words(arguments, groups())
    words = {argument.partition("=")[0] for argument in arguments}
    own, token = sys.argv, _take.set(take)
    sys.argv = [own[0], *in_hydras_order(arguments), *([] if words & HYDRA_ONLY else ["--multirun"])]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing, and explain() writes the message
    compose_once()
    map_choices_if_asked()
    read_files_once()
    try:
        register(SWEEPS, arguments)
        with callers_hydra_aside():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(_never_called)()
    except BrokenPipeError:  # who read what was printed has left, as `head` does: nothing is wrong with the command
        raise
    except (HydraException, OmegaConfBaseException, ConfigError, OSError) as error:
        raise ConfigError(explain(error)) from None  # a notebook would show a hundred lines of Hydra
    finally:
        sys.argv = own
        _take.reset(token)


@contextlib.contextmanager
def callers_hydra_aside() -> Iterator[None]:
    """Set the Hydra of the library's caller aside within the block, because a process can have only one at a time."""
    state, config = GlobalHydra.instance(), HydraConfig.instance()
    before, state.hydra = (state.hydra, config.cfg), None
    try:
        yield
    finally:
        state.hydra, config.cfg = before


def in_hydras_order(arguments: Sequence[str]) -> list[str]:
    """Return the overrides before the options, because Hydra's parser refuses `+experiment=NAME -m norm=rmsnorm`."""
    overrides = [a for a in arguments if not a.startswith("-") and ("=" in a or a.startswith("~"))]
    return overrides + [a for a in arguments if a not in overrides and a not in MULTIRUN]


def _never_called(config: DictConfig) -> None:
    """Stand in for the task function that Hydra requires; our launcher does not call it."""


def launch_jobs(loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]], launcher: Launcher) -> None:
    """Pass the jobs to the caller of `hand_over`; our Hydra launcher calls this. Exit with the code if it is not 0."""
    take = _take.get() or plan_and_launch  # which imports torch while the jobs of a large sweep are composed
    if code := take(begin_in_processes(functools.partial(compose, loader, master), jobs), launcher):
        sys.exit(code)


def plan_and_launch(composed: Callable[[], list[Composed]], launcher: Launcher) -> int:
    gc.disable()  # imports leave no garbage, and each collection goes through all imported objects
    from mxstudy.launch.start import launch  # imports torch

    gc.freeze()  # imported objects stay; a garbage collection of them takes a tenth of a launch
    gc.enable()
    return launch(composed, launcher).code
