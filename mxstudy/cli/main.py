"""The entry point: tell what a command asks for, help, a look at launched jobs or runs, and do it."""

from __future__ import annotations

import functools
import signal
import sys
import textwrap
from collections.abc import Sequence

from mxstudy.cli.shown import show, without_cfg
from mxstudy.cli.through_hydra import hand_over
from mxstudy.explain import explain
from mxstudy.help.answers import answer
from mxstudy.help.group_choices import groups
from mxstudy.reader import ConfigError
from mxstudy.words import HELP, check_shape, unquoted

LAUNCHED = {"launch", "+launch"}
USAGE = """\
usage: python -m mxstudy +experiment=NAME [GROUP=CHOICE ...] [KEY=VALUE ...]
       python -m mxstudy +sweep=NAME [GROUP=CHOICE ...] [KEY=VALUE ...]

Several values make a sweep: norm=rmsnorm,mxnorm_p2 optimizer.lr=1e-3,2e-3
+debug=tiny rehearses any experiment on a laptop; --cfg job prints the config of each run and runs nothing.
--help NAME explains a key, a group, GROUP=CHOICE or a probe: --help optimizer.lr
hydra/launcher=local or slurm submits the jobs and returns (wait=true waits); dry_run=true prints their cost.

       python -m mxstudy +launch=status|cancel|retry [run=FINGERPRINT] [+experiment=NAME] [GROUP=CHOICE ...]
       python -m mxstudy figure [NAME] | report | export --runs FOLDER ...
       source <(mxstudy completion bash)   or zsh: tab completion in this shell

"""


def main() -> None:
    """Run `python -m mxstudy`."""
    arguments = sys.argv[1:]
    words = {argument.partition("=")[0] for argument in arguments}
    if not words or words & HELP:
        explain_names([argument for argument in arguments if argument not in HELP])
        return
    if words & LAUNCHED:
        sys.exit(after_launch(arguments))
    try:
        to_show = without_cfg(arguments)
        hand_over(arguments) if to_show is None else hand_over(to_show, show)
    except ConfigError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def explain_names(names: Sequence[str]) -> None:
    """Print the help for each name, or all groups if there is none; exit with a message for an unknown name."""
    try:
        print("\n\n".join(map(answer, names)) or usage())
    except ConfigError as error:
        sys.exit(str(error))


def after_launch(arguments: list[str]) -> int | str:
    """Run +launch=status, cancel or retry, which need no Hydra because the run folders hold everything.

    Return an exit code, or an error message.
    """
    from mxstudy.launch.commands import run  # imports torch

    try:
        check_shape(arguments, groups())
        (command,) = (value for key, _, value in (a.partition("=") for a in arguments) if key in LAUNCHED)
        return run(command, [unquoted(a) for a in arguments if a.partition("=")[0] not in LAUNCHED])
    except (ConfigError, OSError) as error:
        return explain(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def usage() -> str:
    wrap = functools.partial(textwrap.fill, width=100, subsequent_indent=" " * 18)
    lines = [wrap(f"  {group:<16}{', '.join(choices)}") for group, choices in groups().items()]
    return USAGE + "\n".join(["groups and their choices:", *lines])
