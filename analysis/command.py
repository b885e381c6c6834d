"""Run a script of analysis/ on the runs of one moment, and print one line if it cannot read them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mxstudy.results import ConfigError, one_line, one_look

P = ParamSpec("P")
R = TypeVar("R")


def command(main: Callable[P, R]) -> Callable[P, R]:
    """Return a script's `main` that looks for its runs once.

    It prints an error about its files in one line, and exits with 1.
    """

    @functools.wraps(main)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            with one_look():
                return main(*arguments, **options)
        except (ConfigError, OSError) as error:
            print(one_line(error), file=sys.stderr)
            sys.exit(1)

    return run
