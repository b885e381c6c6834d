"""Run a script of analysis/: look for its runs once, and report a wrong option or file in one line."""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, ParamSpec, TypeVar

from mxstudy.results import ConfigError, one_line, one_look

P = ParamSpec("P")
R = TypeVar("R")

NO_RUNS = re.compile(r"required: .*--runs|argument --runs: expected")  # in argparse's messages


class Parser(argparse.ArgumentParser):
    """The options of a script, whose docstring is the first part of --help."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after one line on what is wrong. argparse would print the usage first, which --help has."""
        advice = "; --runs runs/NAME takes the runs of an experiment or a sweep" if NO_RUNS.search(message) else ""
        self.exit(2, f"{self.prog}: error: {message}{advice}\n")

    @contextmanager
    def usage_errors(self, kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
        """End the script as `error` does if the block raises an exception of one of these kinds."""
        try:
            yield
        except kinds as error:
            self.error(str(error))


def without_command(shows: str | None) -> str:
    """Return a script's docstring without the command at its end: the text of a caption."""
    return (shows or "").partition("python -m")[0].strip()


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
