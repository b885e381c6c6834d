"""How every script of analysis/ ends where it cannot read what it was given: in one line, without a traceback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mxstudy.results import ConfigError, one_line

P = ParamSpec("P")
R = TypeVar("R")


def command(main: Callable[P, R]) -> Callable[P, R]:
    """Return a script's `main` that prints an error about its files on stderr, and exits with 1."""

    @functools.wraps(main)
    def run(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return main(*arguments, **options)
        except (ConfigError, OSError) as error:
            print(one_line(error), file=sys.stderr)
            sys.exit(1)

    return run
