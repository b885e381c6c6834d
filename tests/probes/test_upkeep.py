"""Weights, memory and time are right: the probes that see no activation."""

from __future__ import annotations

import mmap

import numpy as np
import psutil
import pytest
import tiny
import torch

from mxstudy.config import observation
from mxstudy.model import LayerNorm, NormLinear
from mxstudy.probes.base import StepView
from mxstudy.probes.memory import Memory
from mxstudy.probes.timing import Timing
from mxstudy.probes.weights import Weights
from mxstudy.train import loop
from mxstudy.train.loop import begin_step, record_steps

CPU = torch.device("cpu")


def view(model: torch.nn.Module) -> StepView:
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    return StepView(0, lambda: torch.ones(2), model, lambda: (tokens, tokens), tokens.numel())


def test_weights_are_measured_and_gains_more_closely():
    model = torch.nn.ModuleDict({"up": NormLinear(LayerNorm(4, bias=True), 2, 0.02)})
    values = {
        "up.weight": [[1.0, -2, 3, 0], [0, 0, 0, -4]],
        "up.norm.weight": [1.0, 2, -3, 1],
        "up.norm.bias": 4 * [0.5],
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(values[name]))
    measured = Weights(observation.Weights(every_steps=1)).measure(view(model))
    gain = np.array(values["up.norm.weight"])
    assert measured == pytest.approx(
        {
            "up.weight/rms": (30 / 8) ** 0.5,
            "up.weight/absmax": 4.0,
            "up.norm.weight/rms": (15 / 4) ** 0.5,
            "up.norm.weight/absmax": 3.0,
            "up.norm.weight/mean": gain.mean(),
            "up.norm.weight/std": gain.std(),
            "up.norm.weight/min": -3.0,
            "up.norm.weight/max": 2.0,
            "up.norm.bias/rms": 0.5,
            "up.norm.bias/absmax": 0.5,
        },
        rel=1e-6,
    )


def test_a_norm_without_a_gain_has_none():
    assert Weights(observation.Weights()).measure(view(NormLinear(LayerNorm(4, affine=False), 2, 0.02))).keys() == {
        "weight/rms",
        "weight/absmax",
    }


def test_memory_of_the_process():
    probe, model = Memory(observation.Memory(every_steps=1)), torch.nn.Linear(1, 1)
    before = probe.measure(view(model))
    assert before.keys() == {"rss_gib"}
    assert before["rss_gib"] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.2)
    with mmap.mmap(-1, 2**28) as held:  # pages that no allocator had before
        held[::4096] = bytes(2**28 // 4096)
        assert probe.measure(view(model))["rss_gib"] - before["rss_gib"] == pytest.approx(0.25, abs=0.02)


def test_time_is_what_lies_between_two_marks_added_up_by_phase(monkeypatch):
    clock_s = iter([0.0, 0.001, 0.005, 0.006, 0.016, 0.017])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock_s))
    probe = Timing(observation.Timing(every_steps=1))
    for phase in ("begin", "data", "forward", "data", "forward", "clip"):
        probe.mark(phase, CPU)
    assert probe.measure(view(torch.nn.Identity())) == pytest.approx({"data_ms": 2, "forward_ms": 14, "clip_ms": 1})
    assert probe.marks == []


def test_the_phases_of_a_step_come_in_their_order_and_are_the_whole_step(monkeypatch):
    run, memory = tiny.build(micro_batch_size=2)
    run.probes = [probe := Timing(observation.Timing(every_steps=2))]
    marks, mark = [], probe.mark
    monkeypatch.setattr(probe, "mark", lambda phase, device: (marks.append(phase), mark(phase, device)))
    began_s = loop.time.perf_counter()
    begin_step(run, 0)
    whole_ms = (loop.time.perf_counter() - began_s) * 1e3
    record_steps(run)
    part = ["data", "forward", "backward"]
    assert marks == ["begin", *part, *part, "clip", "optimizer"]
    row, _ = memory.rows
    assert list(row["values"]) == ["data_ms", "forward_ms", "backward_ms", "clip_ms", "optimizer_ms"]
    assert 0.5 * whole_ms < sum(row["values"].values()) <= whole_ms
    begin_step(run, 1)
    record_steps(run)
    assert [one.get("probe") for one in memory.rows] == ["timing", None, None]
    assert len(marks) == 9
    assert run.clocks == []
