"""Processes share the work among the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

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
        assert many.map_in_processes(work, range(number)) == [(n * n, True) for n in range(number)]
    for number in (many.MANY, 2 * many.MANY, 1000):
        assert many.map_in_processes(work, range(number)) == [(n * n, False) for n in range(number)]


def test_what_a_share_raises_is_raised() -> None:
    def work(items: Sequence[int]) -> Iterator[float]:
        return (1 / (n - 700) for n in items)

    with pytest.raises(ZeroDivisionError):
        many.map_in_processes(work, range(1000))
