"""What a profile of training steps says of the time without a kernel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_log import Span
from benchmarks.kernel_times import waits_of
from benchmarks.timing import Timed


def test_kernels_that_run_at_once_keep_the_gpu_busy_once() -> None:
    ranges = [SimpleNamespace(start=10, end=30), SimpleNamespace(start=0, end=20), SimpleNamespace(start=50, end=60)]
    events: list[Any] = [SimpleNamespace(time_range=one) for one in ranges]  # 0 to 30 and 50 to 60 microseconds
    found = waits_of(events, Timed(Span(5.0, 5.0001), 0, 0), steps=2)
    assert found == pytest.approx({"step_ms": 0.05, "busy_ms": 0.02, "idle_ms": 0.03})
