"""Measure the cost of the probes: steps on which a set of them is due, compared with steps without, in one run.

The sets take turns, so that a GPU that warms up or slows down affects all of them alike. Overhead is the extra time of
a step, spread over the steps from one measurement to the next. Steps follow one another as in a training, whose host
launches a step before the one before it has ended. Tokens are random, and the journal is written.

python -m benchmarks.probes [--size llama_125m] [--rounds 20] [--each] [--json PATH]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import measured, options_of, show
from benchmarks.timing import median_and_spread, synchronize
from benchmarks.training import Written, build, everywhere, pretraining
from mxstudy import config
from mxstudy.probes.build import PROBES, build_probes, build_spikes
from mxstudy.tracking.journal import Journal
from mxstudy.train.loop import TrainingRun, begin_step, record_steps
from mxstudy.train.runtime import configure_torch, resolve_device

WARMUP_ROUNDS = 2  # the first compiles
STEPS = 4  # that follow one another in a measurement

# Model and training step of experiment=lr_sensitivity, and a tiny version to try out the benchmark.
SIZES = {
    "llama_125m": (
        config.Decoder(hidden_size=1024, ffn_size=4096, num_layers=8, num_heads=16, num_kv_heads=4, vocab_size=32_000),
        config.Train(steps=10_000, batch_size=32, micro_batch_size=16, sequence_length=4096, compile=True),
    ),
    "tiny": (
        config.Decoder(hidden_size=64, ffn_size=128, num_layers=3, num_heads=2, num_kv_heads=1, vocab_size=320),
        config.Train(steps=10_000, batch_size=4, sequence_length=64, device="cpu"),
    ),
}


@dataclass(frozen=True)
class Due:
    """A set of probes, how often it is due, and the largest allowed overhead (None: it is only reported)."""

    names: tuple[str, ...]
    every_steps: int
    limit: float | None = None
    spikes: bool = False  # adds the spike watch and the ring of features, which look at every step


ALL_BUT_GRADIENT_BIAS = tuple(name for name in PROBES if name != "gradient_bias")
SETS = {
    "norm_output_rms": Due(("norm_output_rms",), 1, limit=0.015),
    "all but gradient_bias": Due(ALL_BUT_GRADIENT_BIAS, 100, limit=0.01),
    "gradient_bias": Due(("gradient_bias",), 500),
    "spike watch, ring of features": Due(("outlier_features",), 1, spikes=True),
}
EACH = {f"{name} alone": Due((name,), 100) for name in ALL_BUT_GRADIENT_BIAS}


def build_size(size: str, folder: Path) -> TrainingRun:
    """Return a run of that size with random tokens and its journal in `folder`."""
    model, train = SIZES[size]
    settings = pretraining(model, config.MXNorm(p=2.0), everywhere("mxfp8_e5m2_grad"), train, lr=1e-3)
    configure_torch(train.compile, train.deterministic)
    return build(settings, resolve_device(train.device), Written(Journal(folder / "metrics.jsonl")))


def observe(run: TrainingRun, due: Due | None, folder: Path) -> None:
    """Observe every step from now on with the probes of `due`, or with none for None."""
    names = due.names if due else ()
    scheduled = {f.name: type(getattr(config.Probes(), f.name))(every_steps=1) for f in fields(config.Probes)}
    spikes = scheduled["spikes"] if due and due.spikes else config.Spikes()
    probes = config.Probes(**{name: scheduled[name] for name in names}, spikes=spikes)
    run.probes = build_probes(probes)
    run.spikes = build_spikes(probes, run.probes, folder, lambda: None, [])


def step_s(run: TrainingRun, steps: int) -> float:
    """Do `steps` steps of the training loop, journal included, and return the seconds of one."""
    synchronize(run.device)
    began_s = time.perf_counter()
    for step in range(steps):
        begin_step(run, step)
        record_steps(run, run.ahead)
    record_steps(run)
    synchronize(run.device)
    return (time.perf_counter() - began_s) / steps


def measure(size: str, rounds: int, sets: Mapping[str, Due] = SETS) -> list[dict[str, Any]]:
    """Return a row per set of probes: median milliseconds of a step without and with it, and its overhead.

    The extra time is the median of the differences within a round; its spread is half the interquartile range.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = build_size(size, folder)
        times: dict[str, list[float]] = {each: [] for each in ("none", *sets)}
        for number in range(WARMUP_ROUNDS + rounds):
            for each, step_times in times.items():
                observe(run, sets.get(each), folder)
                step_s(run, 1)  # the first step of a set allocates its buffers
                seconds = step_s(run, STEPS)
                if number >= WARMUP_ROUNDS:
                    step_times.append(seconds * 1e3)
    none_ms = np.array(times.pop("none"))
    return [row(each, sets[each], none_ms, np.array(ms)) for each, ms in times.items()]


def row(name: str, due: Due, none_ms: np.ndarray, due_ms: np.ndarray) -> dict[str, Any]:
    extra, spread = median_and_spread(due_ms - none_ms)
    step = float(np.median(none_ms))
    overhead = extra / step / due.every_steps
    return {
        "probes": name,
        "every_steps": due.every_steps,
        "step_ms": step,
        "due_step_ms": float(np.median(due_ms)),
        "extra_ms": extra,
        "extra_spread_ms": spread,
        "overhead": overhead,
        "limit": due.limit,
        "within_limit": None if due.limit is None else overhead <= due.limit,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("probes", __doc__)
    parser.add_argument("--size", choices=SIZES, default="llama_125m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--each", action="store_true", help="measure each probe alone as well")
    chosen = parser.parse_args(arguments)
    rows = measure(chosen.size, chosen.rounds, SETS | (EACH if chosen.each else {}))
    show(rows)
    measured(rows, chosen.json, size=chosen.size, rounds=chosen.rounds)


if __name__ == "__main__":
    main()
