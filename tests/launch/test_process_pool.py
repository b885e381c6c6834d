"""Processes share the work among the cores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mxstudy.launch import process_pool as many


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})


@pytest.mark.integration
def test_many_items_are_shared_out_in_order() -> None:
    here, not_picklable = os.getpid(), lambda n: n * n

    def work(items: Sequence[int]) -> Iterator[tuple[int, bool]]:
        return ((not_picklable(n), os.getpid() == here) for n in items)

    for number in (0, 1, many.MANY - 1):
        assert many.begin_in_processes(work, range(number))() == [(n * n, True) for n in range(number)]
    for number in (many.MANY, 2 * many.MANY, 1000):
        assert many.begin_in_processes(work, range(number))() == [(n * n, False) for n in range(number)]


def test_processes_begin_at_once_and_few_items_wait_for_the_call(tmp_path: Path) -> None:
    def work(items: Sequence[int]) -> Iterator[int]:
        (tmp_path / f"{len(items)} items from {items[0]}").touch()
        return iter(items)

    few = many.begin_in_processes(work, range(2))
    begun = many.begin_in_processes(work, range(2 * many.MANY))
    while len([*tmp_path.iterdir()]) < 3:
        time.sleep(0.01)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "42 items from 0",
        "43 items from 42",
        "43 items from 85",
    ]
    assert few() == [0, 1]
    assert (tmp_path / "2 items from 0").exists()
    assert begun() == [*range(2 * many.MANY)]


def test_what_a_share_raises_is_raised() -> None:
    def work(items: Sequence[int]) -> Iterator[float]:
        return (1 / (n - 700) for n in items)

    with pytest.raises(ZeroDivisionError):
        many.begin_in_processes(work, range(1000))()
