"""Progress is shown on a terminal, and in a file."""

from __future__ import annotations

import errno
import io

import pytest
from each import each

from mxstudy.train import progress
from mxstudy.train.progress import Progress, clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(step: int) -> dict[str, float]:
    return {"step": step, "loss": 5.5, "tokens_per_s": 12345.6}


def shown(stream: io.StringIO, steps: int, monkeypatch: pytest.MonkeyPatch, every_s: float = 10.0) -> str:
    """Return what `steps` steps, one every `every_s`, leave in the stream."""
    now_s = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now_s)
    live = Progress("seed=1", steps, stream)
    for step in range(steps):
        live.show(row(step))
        now_s += every_s
    return stream.getvalue()


def test_a_file_gets_whole_lines_now_and_then_the_first_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(io.StringIO(), 8, monkeypatch)
    assert "\r" not in said
    assert said.splitlines() == [
        "seed=1  step 1/8  loss 5.5000  12,346 tokens/s",
        "seed=1  step 4/8  loss 5.5000  12,346 tokens/s  0:40 left",
        "seed=1  step 7/8  loss 5.5000  12,346 tokens/s  0:10 left",
        "seed=1  step 8/8  loss 5.5000  12,346 tokens/s  0:00 left",
    ]


def test_a_terminal_has_one_line_that_ends_with_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(Terminal(), 3, monkeypatch)
    assert said.count("\r\033[K") == 3
    assert said.count("\n") == 1
    assert said.endswith("0:00 left\n")


def test_a_long_label_leaves_room_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    Progress("precision=mxfp8 norm=rmsnorm optimizer.lr=1e-3", 2, stream).show_part("corpus", 1, 2)
    assert stream.getvalue() == "\r\033[Kprecision=mxfp8 norm=  corpus  50% done"


def test_an_evaluation_between_two_steps_says_what_it_asks_and_how_much_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, stream = 100.0, io.StringIO()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now_s)
    live = Progress("seed=1", 10, stream)
    for done in range(0, 101, 10):
        live.show_part("evaluation: csqa cf", done, 100)
        now_s += 10.0
    shown = [f"seed=1  evaluation: csqa cf  {done}% done" for done in (0, 30, 60, 90, 100)]
    assert stream.getvalue().splitlines() == shown


def test_a_line_that_is_left_open_ends_before_something_else_is_said() -> None:
    stream = Terminal()
    live = Progress("seed=1", 10, stream)
    live.close()
    assert stream.getvalue() == ""
    live.show(row(0))
    assert not stream.getvalue().endswith("\n")
    live.close()
    live.close()
    assert stream.getvalue().endswith("tokens/s\n")
    assert stream.getvalue().count("\n") == 1


def test_a_long_line_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    Progress("x" * 100, 10, stream).show(row(0))
    assert len(stream.getvalue().removeprefix("\r\033[K")) == 39


@each(("seconds", "text"), [(5, "0:05"), (65, "1:05"), (3605, "1:00:05")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


class Closed(Terminal):
    def write(self, text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_has_closed_ends_no_training() -> None:
    live = Progress("seed=1", 2, Closed())
    live.show(row(0))
    live.show(row(1))
    assert not live.is_open
