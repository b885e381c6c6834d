"""The online detector agrees with a naive one, keeps what it should, and reports a full disk without ending the run."""

from __future__ import annotations

import errno
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from each import each

from mxstudy.config import observation
from mxstudy.probes.base import StepView
from mxstudy.probes.outliers import FeatureRing
from mxstudy.probes.ring_file import read_ring
from mxstudy.probes.spike_watch import SpikeWatch
from mxstudy.probes.spikes import SpikeDetector, count_spikes

SETTINGS = observation.Spikes(every_steps=1, window_steps=16, threshold=4.0)


def view(step: int, loss: float, grad_norm: float = 1.0) -> StepView:
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    return StepView(
        step,
        lambda: torch.tensor([loss, grad_norm], dtype=torch.float64),
        torch.nn.Identity(),
        lambda: (tokens, tokens),
        tokens.numel(),
    )


def spiky(steps: int, seed: int) -> list[float]:
    """Return falling, noisy losses with spikes of one to five steps, some of them before a window is full."""
    draw = random.Random(seed)
    losses = [2 + 3 * math.exp(-step / 50) + draw.gauss(0, 0.05) for step in range(steps)]
    for _ in range(steps // 25):
        start, height = draw.randrange(steps), draw.uniform(0.2, 5)
        for step in range(start, min(start + draw.randrange(1, 6), steps)):
            losses[step] += height
    return losses


def naive(losses: Sequence[float], window: int, threshold: float) -> list[int]:
    """Return the steps that spike after one that does not, each computed from the whole curve."""

    def spikes(t: int) -> bool:
        if t < window:
            return False
        before = losses[t - window : t]
        return losses[t] > statistics.fmean(before) + threshold * statistics.pstdev(before)

    return [t for t in range(len(losses)) if spikes(t) and not (t and spikes(t - 1))]


def detected(losses: Sequence[float], window: int, threshold: float, resumed_at: int = 0) -> list[int]:
    detector = SpikeDetector(window, threshold, losses[:resumed_at])
    return [t for t, loss in enumerate(losses) if t >= resumed_at and detector.see(loss)]


@pytest.mark.integration
@each("seed", range(4))
@each(("window", "threshold"), [(128, 6.0), (16, 4.0), (2, 1.0)])
def test_the_detector_is_its_definition(seed: int, window: int, threshold: float) -> None:
    losses = spiky(1200, seed)
    expected = naive(losses, window, threshold)
    assert len(expected) > 2
    assert detected(losses, window, threshold) == expected


@pytest.mark.integration
@each("window", [2, 16, 128])
def test_a_resume_anywhere_finds_the_same_spikes(window: int) -> None:
    losses = spiky(300, seed=1)
    whole = detected(losses, window, 3.0)
    assert len(whole) > 2
    for start in range(0, 300, 7):
        assert detected(losses, window, 3.0, resumed_at=start) == [t for t in whole if t >= start]


def test_steps_of_one_spike_are_one() -> None:
    losses = [2.0 + 0.01 * (-1) ** t for t in range(16)] + [3.0, 4.0, 5.0] + [2.0] * 3
    assert detected(losses, 16, 4.0) == [16]


def test_the_moments_are_those_of_the_window_before() -> None:
    losses = [2.0 + 0.1 * (-1) ** t for t in range(16)]
    spike = SpikeDetector(16, 4.0, [100.0, *losses]).see(3.0)
    assert spike == pytest.approx((3.0, 2.0, 0.1), rel=1e-12)


class Pins:
    def __init__(self, newest: str | None) -> None:
        self.newest, self.asked = newest, 0

    def __call__(self) -> str | None:
        self.asked += 1
        return self.newest


def watch_over(
    losses: Sequence[float], folder: Path, pin: Pins, ring: FeatureRing | None = None, start: int = 0
) -> list[dict]:
    watch = SpikeWatch(SETTINGS, ring, folder, pin, losses[:start])
    rows = []
    for step, loss in enumerate(losses[start:], start):
        if ring:
            ring.watch("norm", torch.nn.Identity(), torch.full((1, 2, 3), float(step)))
            ring.measure(view(step, loss))
        rows.append(watch.look(view(step, loss)))
    return [row for row in rows if row]


def flat_but_at(spike: int, steps: int) -> list[float]:
    return [2.0 + 0.01 * (-1) ** t + (t == spike) for t in range(steps)]


def ring_of(steps: int) -> FeatureRing:
    return FeatureRing(observation.OutlierFeatures(every_steps=1, ring_steps=steps))


def test_a_spike_pins_once_and_writes_the_ring_then_again_with_what_followed(tmp_path: Path) -> None:
    pin, name = Pins("step_00000020"), "spikes/step_00000025.safetensors"
    (row,) = watch_over(flat_but_at(25, 27), tmp_path, pin, ring_of(8))
    assert row["step"] == 25
    assert row["spike"] == {
        "loss": pytest.approx(2.99),
        "mean": pytest.approx(2.0),
        "std": pytest.approx(0.01),
        "ring": name,
        "checkpoint": "step_00000020",
    }
    assert pin.asked == 1
    assert read_ring(tmp_path / name)[0] == list(range(18, 26))
    watch_over(flat_but_at(25, 40), tmp_path, pin, ring_of(8))
    steps, norms = read_ring(tmp_path / name)
    assert steps == list(range(20, 28))
    assert norms["norm"][:, 0].tolist() == steps


def test_after_a_resume_the_ring_says_which_steps_it_has(tmp_path: Path) -> None:
    (row,) = watch_over(flat_but_at(25, 26), tmp_path, Pins(None), ring_of(8), start=23)
    assert read_ring(tmp_path / row["spike"]["ring"])[0] == [23, 24, 25]


def test_without_checkpoint_and_ring_the_row_says_so(tmp_path: Path) -> None:
    (row,) = watch_over(flat_but_at(25, 30), tmp_path, Pins(None))
    assert row["spike"]["checkpoint"] is None
    assert row["spike"]["ring"] is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("loss", "grad_norm"), [(math.nan, math.nan), (math.inf, 1.0), (2.0, math.inf)])
def test_what_is_not_finite_is_a_spike_at_any_time(loss: float, grad_norm: float, tmp_path: Path) -> None:
    watch = SpikeWatch(SETTINGS, None, tmp_path, Pins("step_00000002"), [4.0, 3.0])
    row = watch.look(view(2, loss, grad_norm))
    assert row is not None
    assert row["spike"]["mean"] == 3.5
    assert row["spike"]["checkpoint"] == "step_00000002"
    first = SpikeWatch(SETTINGS, None, tmp_path, Pins(None)).look(view(0, math.nan))
    assert first is not None
    assert math.isnan(first["spike"]["mean"])


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_said_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_bytes", full)
    row, later = watch_over(flat_but_at(25, 40), tmp_path, Pins("step_00000020"), ring_of(8))
    assert row["spike"]["ring"] is None
    assert "No space left on device" in row["spike"]["ring_error"]
    assert row["spike"]["checkpoint"] == "step_00000020"
    assert list((tmp_path / "spikes").iterdir()) == []
    assert later == {"step": 27, "ring_error": f"after the spike at step 25: {row['spike']['ring_error']}"}


def test_a_disk_that_is_full_when_the_ring_is_written_again_is_said_at_that_step(tmp_path: Path) -> None:
    """Also if the next spike begins at it, whose own ring fits: the row then has both."""
    ring, losses = ring_of(8), flat_but_at(25, 40)
    losses[27] = 9.0
    write, steps = ring.write, []

    def full_at_the_second(path: Path) -> None:
        steps.append(path.stem)
        full() if len(steps) == 2 else write(path)

    ring.write = full_at_the_second  # type: ignore[method-assign]
    first, second = watch_over(losses, tmp_path, Pins(None), ring)
    assert "ring_error" not in first["spike"]
    assert (second["step"], second["spike"]["loss"], "ring_error" in second["spike"]) == (27, 9.0, False)
    assert second["ring_error"].startswith("after the spike at step 25: [Errno 28] No space left on device")
    assert read_ring(tmp_path / first["spike"]["ring"])[0] == list(range(18, 26))
    assert steps == [f"step_{step:08d}" for step in (25, 25, 27, 27)]


def test_a_checkpoint_that_cannot_be_pinned_is_said_too(tmp_path: Path) -> None:
    watch = SpikeWatch(SETTINGS, None, tmp_path, full)  # type: ignore[arg-type]
    row = watch.look(view(0, math.inf))
    assert row is not None
    assert row["spike"]["checkpoint"] is None
    assert "No space left on device" in row["spike"]["checkpoint_error"]


def test_spikes_of_a_whole_curve_are_counted() -> None:
    draw = np.random.default_rng(0)
    losses = (2.0 + 0.01 * draw.standard_normal(600)).tolist()
    assert count_spikes(losses) == 0
    losses[300:303] = [3.0, 3.0, 3.0]  # one spike
    losses[20] = 3.0  # before the window is full
    losses[500] = 9.0
    assert count_spikes(losses) == 2
    assert count_spikes([*losses, math.nan]) == 3
