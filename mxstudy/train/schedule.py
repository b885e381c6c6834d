"""Learning-rate schedules: pure functions of the step, so a resumed run has no schedule state to restore."""

from __future__ import annotations

import math

from mxstudy import config

# Each shape maps the decay's progress in 0..1 to a height between the final ratio (0) and the peak (1).
SHAPES = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
    "wsd": lambda progress: 1.0 - progress,
}


def lr_ratio(schedule: config.Schedule, step: int, steps: int) -> float:
    """Return learning rate / peak at `step` (0 .. steps - 1); the first step after the warm-up is at the peak."""
    warmup_steps = schedule.warmup(steps)
    if step < warmup_steps:
        return schedule.initial_ratio + (1.0 - schedule.initial_ratio) * (step + 1) / (warmup_steps + 1)
    decay_start = steps - schedule.decay(steps) if schedule.kind == "wsd" else warmup_steps
    span = steps - 1 - decay_start
    # With a span of 0 the last step is at the end of a decay of one step (wsd), or at the peak after the warm-up.
    without_span = float(schedule.kind == "wsd" and step == decay_start)
    progress = max(0.0, step - decay_start) / span if span else without_span
    height = SHAPES[schedule.kind](progress)
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * height
