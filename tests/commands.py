"""Run `python -m mxstudy ARGUMENTS` in a process of its own, and disturb it at a chosen moment.

A moment is one of Python's audit events (a file is opened, renamed, ...), so it is met exactly, however slow or fast
the machine is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import forked
import pytest

from benchmarks.disturbed import audit_os_write, become_command
from mxstudy.cli.main import main
from mxstudy.tracking.folder import RunFolder, Status

EVENTS = ("open", "os.mkdir", "os.rename", "os.write", "shutil.rmtree")
TINY = ("+experiment=quickstart", "+debug=tiny", "runs_dir=runs", "train.deterministic=true", "tracking=none")
ONE_BLOCK = ("model.num_layers=1", "train.batch_size=2")
OWN_TEXT = ("data=text", "tokenizer=bytes", "validation.sequences=2", "data.validation_fraction=0.2")
SMALL = (
    *("+experiment=quickstart", "tracking=none", "train.steps=6", "train.batch_size=2", "train.sequence_length=32"),
    *("model.hidden_size=32", "model.ffn_size=64", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1"),
    *("checkpoint.every_steps=2", "train.deterministic=true"),
)


@dataclass(frozen=True)
class Fault:
    """A signal or an errno at the `count`-th event whose text, like "open ('PATH', ...)", matches `pattern`.

    An errno is raised in place of that event and of all later ones that match. `torn` writes half of the data first.
    """

    pattern: str
    signal: signal.Signals | None = None
    errno: int | None = None
    count: int = 1
    torn: bool = False

    def install(self) -> None:
        """Apply this from now on in this process."""
        seen, write = 0, audit_os_write()

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event not in EVENTS or not re.search(self.pattern, f"{event} {arguments}"):
                return
            seen += 1
            if self.errno is not None and seen >= self.count:
                raise OSError(self.errno, os.strerror(self.errno))
            if self.signal is not None and seen == self.count:
                if self.torn:
                    write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), self.signal)

        sys.addaudithook(hook)


@dataclass
class Command:
    """A process that runs, or ran, the command line in `folder`."""

    process: ForkServerProcess
    output: Path

    def ended(self, timeout_s: float = 120.0) -> int:
        """Return the exit code, or -9 if SIGKILL ended the process."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            raise TimeoutError(self.said)
        return self.process.exitcode

    @property
    def said(self) -> str:
        return self.output.read_text()


def latest(arguments: Iterable[str]) -> list[str]:
    """Return the arguments, keeping the later one of two with the same key: tests override SMALL and the like."""
    return list({word.lstrip("+").partition("=")[0] if "=" in word else word: word for word in arguments}.values())


def run_here(folder: Path, *arguments: str) -> None:
    """Run `python -m mxstudy ARGUMENTS` in that folder, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["mxstudy", *latest(arguments)])
        main()


@contextlib.contextmanager
def started(folder: Path, *arguments: str, fault: Fault | None = None) -> Iterator[Command]:
    """Run the command while the block lasts, and kill what is left of it at the block's end."""
    folder.mkdir(exist_ok=True)
    output = folder / f"output-{len(list(folder.glob('output-*')))}"
    process = forked.context().Process(target=in_the_child, args=(folder, arguments, output, fault))
    process.start()
    try:
        yield Command(process, output)
    finally:
        process.kill()
        process.join()


def run(folder: Path, *arguments: str, fault: Fault | None = None) -> tuple[int, str]:
    """Return the exit code and the text on stdout and stderr."""
    with started(folder, *arguments, fault=fault) as command:
        return command.ended(), command.said


def in_the_child(folder: Path, arguments: tuple[str, ...], output: Path, fault: Fault | None) -> None:
    become_command(folder, latest(arguments), output)
    if fault:
        fault.install()
    main()


def killed_at(pattern: str, count: int = 1, torn: bool = False) -> Fault:
    return Fault(pattern, signal.SIGKILL, count=count, torn=torn)


def full_disk_at(pattern: str) -> Fault:
    return Fault(pattern, errno=errno.ENOSPC)


def the_run(folder: Path) -> Path:
    """Return the one run folder under `folder`."""
    (path,) = (status.parent for status in folder.glob("runs/*/*/status.json"))
    return path


def status(folder: Path) -> Status:
    return RunFolder(the_run(folder)).status()


def corpus(folder: Path, documents: int = 40, words: int = 60) -> str:
    """Write local text files, and return the override that names them."""
    (folder / "corpus").mkdir()
    for number in range(documents):
        (folder / "corpus" / f"{number:02}.txt").write_text(" ".join(f"w{(number * w) % 97}" for w in range(words)))
    return f"data.paths=['{folder}/corpus/*.txt']"


def book(folder: Path, name: str = "book", key: str = "data.paths", characters: int = 30_000) -> str:
    """Write one text of so many characters, and return the override that names it as `key`."""
    path = folder / f"{name}.txt"
    path.write_text(f"{name} {' '.join(str(number * number) for number in range(characters // 6))}"[:characters])
    return f"{key}=[{path}]"


def call(*arguments: str) -> tuple[int, str]:
    """Run the command line in this process, and return the exit code and the message that it exits with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mxstudy", *latest(arguments)])
        try:
            main()
        except SystemExit as end:
            return (end.code, "") if isinstance(end.code, int) else (1, str(end.code))
    return 0, ""
