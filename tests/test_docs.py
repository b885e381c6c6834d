"""Every command of README and docs/ is run here, or has the reason why not above it: <!-- not run: REASON -->.

A command of `python -m mxstudy` that is not run is still composed and checked.
"""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import book, call, corpus, run
from composing import compose
from test_adding import recipes
from test_architecture import HEIGHT
from test_glossary import PAGES, ROOT, exists

from mxstudy.config import Probes
from mxstudy.config.run import read_run
from mxstudy.scripts import names
from mxstudy.tracking.folder import RunFolder

REASON = re.compile(r"<!-- not run: (.+) -->")
BEGINS = ("python ", "mxstudy ", "make", "torchrun ", "source ", "apt-get ", "$ ")
INLINE = re.compile(r"`((?:make|python -m) [^`]+)`")
PROGRAM = re.compile(r"^```python\n((?:import|from) .*?)^```$", re.MULTILINE | re.DOTALL)  # not the block of a guide
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
SHOWN_ALONE = ("--cfg", "--help", "dry_run=true")  # in a command that trains nothing
SMALLER = ("train.steps=4", "validation.every_steps=2", "validation.sequences=2")
GIVEN = {  # what a reader has
    "data.paths=[books/*.txt]": corpus,
    "data.paths=[book.txt]": book,
    "data.validation_paths=[another.txt]": lambda folder: book(folder, "another", "data.validation_paths"),
    "data.paths=[tinyshakespeare.txt]": book,
}


class Command(NamedTuple):
    page: str
    words: str
    reason: str | None
    shows: str | None = None  # what it prints, on the page


def blocks(page: Path) -> Iterator[tuple[str | None, list[str]]]:
    """Yield each indented block of a page, with the reason above it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    above, block = "", list[str]()
    for line in [*text.splitlines(), "."]:
        if line.startswith("    "):
            block.append(line.strip())
        elif line:
            if block:
                found = REASON.search(above)
                yield found and found[1], block
            above, block = line, []


def commands_of(page: Path) -> Iterator[Command]:
    for reason, block in blocks(page):
        if not block[0].startswith(BEGINS):
            continue
        lines = "\n".join(block).replace("\\\n", " ").splitlines()
        if lines[0].startswith("$ "):
            yield Command(page.name, lines[0].removeprefix("$ "), reason, lines[1])
            continue
        yield from (Command(page.name, line.split("  #")[0].strip(), reason) for line in lines)


COMMANDS = [*{command.words: command for page in PAGES for command in commands_of(page)}.values()]  # each once
OURS = [command for command in COMMANDS if re.match(r"python -m mxstudy(?= |$)", command.words)]
RUN = [command for command in OURS if not command.reason]
PLANNED = [command for command in OURS if command.reason and "+launch" not in command.words and not command.shows]


def arguments(command: Command) -> list[str]:
    return shlex.split(command.words)[3:]


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 50
    assert len(RUN) > 15
    assert all(command.reason for command in COMMANDS if command not in RUN and not command.words.startswith("make"))
    for page in PAGES:
        assert len(REASON.findall(page.read_text())) == sum(reason is not None for reason, _ in blocks(page)), page


def test_every_target_and_module_of_a_command_exists() -> None:
    inline = [Command(page.name, words, None) for page in PAGES for words in INLINE.findall(page.read_text())]
    for command in [*COMMANDS, *inline]:
        first, *rest = command.words.split()
        if first == "make":
            target = next((word for word in rest if "=" not in word), "help")
            assert target in TARGETS, command
        elif first == "python" and "-m" in rest:
            assert exists(rest[rest.index("-m") + 1]), command


def test_every_option_of_a_script_is_one_that_it_has() -> None:
    """The options are read in the source of their folder, so that no script is started."""
    for command in COMMANDS:
        if found := re.match(
            r"python -m (benchmarks|mxstudy\.evaluation)\.|mxstudy (?:figure|report|export)", command.words
        ):
            folder = ROOT / (found[1] or "analysis").replace(".", "/")
            known = {
                option for path in folder.rglob("*.py") for option in re.findall(r'"(--[a-z-]+)"', path.read_text())
            }
            assert {word for word in command.words.split() if word.startswith("--")} <= known, command


def test_every_figure_of_a_command_exists() -> None:
    drawn = {name for command in COMMANDS for name in re.findall(r"^mxstudy figure (\S+)", command.words)}
    assert {"loss_curves"} < drawn <= {*names()}


def test_the_page_of_probes_has_a_row_for_each() -> None:
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "guides" / "own_probe.md").read_text(), re.MULTILINE)
    head, *named = rows
    assert head == "`probe.NAME.every_steps`"
    assert {name for row in named for name in re.findall(r"`(\w+)`", row)} == {field.name for field in fields(Probes)}


def test_the_map_is_drawn_from_the_table_of_rooms() -> None:
    drawing: Any = runpy.run_path(str(ROOT / "docs" / "draw_map.py"))
    drawn = "\n".join(drawing["picture"](drawing["PAGE"].read_text()))
    assert drawn == drawing["PICTURE"].read_text(), "run python docs/draw_map.py"
    assert drawn.count('class="room"') == len(HEIGHT)


@pytest.mark.integration
def test_every_program_runs(trained: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [program for page in PAGES for program in PROGRAM.findall(page.read_text())]
    assert len(programs) >= 3
    monkeypatch.chdir(trained.path.parents[2])  # it has a run in runs/quickstart
    for program in programs:
        exec(program, {})


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN, ids=lambda command: f"{command.page}: {command.words[18:78]}")
def test_a_command_is_run(command: Command, tmp_path: Path, cache: str, trained: RunFolder) -> None:
    words = arguments(command)
    if command.shows:
        assert call(*words) == (1, command.shows)
        return
    if command.words in {recipe.command for recipe in recipes().values()}:
        pytest.skip("run by tests/test_adding.py")
    trains = any(word.startswith(("+experiment", "+sweep")) for word in words) and not {*SHOWN_ALONE} & {*words}
    words = [GIVEN[word](tmp_path) if word in GIVEN else word for word in words]
    more = ["+debug=tiny", "tracking=none", cache, *SMALLER] if trains else []
    folder = trained.path.parents[2] if "+launch=status" in words else tmp_path
    code, said = run(folder, *dict.fromkeys([*words, *more]))
    assert code == 0, said
    assert said.strip()


@pytest.mark.slow
@pytest.mark.parametrize("command", PLANNED, ids=lambda command: f"{command.page}: {command.words[18:78]}")
def test_a_command_that_cannot_be_run_here_is_right(command: Command) -> None:
    words = arguments(command)
    for job in compose(*words, each_value_once=True):
        assert isinstance(job.values, dict), job.values
        read_run(job.values)
