"""What a profile of training steps says of the time without a kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_log import Span
from benchmarks.kernel_times import gaps_of, waits_of
from benchmarks.timing import Timed


def test_kernels_that_run_at_once_keep_the_gpu_busy_once() -> None:
    ranges = [SimpleNamespace(start=10, end=30), SimpleNamespace(start=0, end=20), SimpleNamespace(start=50, end=60)]
    events: list[Any] = [SimpleNamespace(time_range=one) for one in ranges]  # 0 to 30 and 50 to 60 microseconds
    found = waits_of(events, Timed(Span(5.0, 5.0001), 0, 0), steps=2)
    assert found == pytest.approx({"step_ms": 0.05, "busy_ms": 0.02, "idle_ms": 0.03})


def test_gaps_are_named_by_the_kernels_around_them() -> None:
    """A kernel that ends while a longer one runs does not end a gap's kernel before it."""
    times = {"a": (0, 10), "long": (12, 40), "short": (15, 20), "b": (70, 80), "a again": (81, 90)}
    events: list[Any] = [
        SimpleNamespace(name=n, time_range=SimpleNamespace(start=s, end=e)) for n, (s, e) in times.items()
    ]
    assert gaps_of(events, steps=2) == [
        {"after": "long", "before": "b", "gaps": 0.5, "ms": pytest.approx(0.015)},
        {"after": "a", "before": "long", "gaps": 0.5, "ms": pytest.approx(0.001)},
        {"after": "b", "before": "a again", "gaps": 0.5, "ms": pytest.approx(0.0005)},
    ]
