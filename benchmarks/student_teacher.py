"""Measure steps x replicas per second for stacks of students of several widths in the study itself, and an upper bound.

study: the study's own run, with its journal, from the end of its first 500 steps to its last. eager: the same step
without compiler and CUDA graph. ceiling: the time of the step's matrix products alone, in bf16 and batched, plus that
of the bytes that everything else must at least move, at a copy's bandwidth. It counts each tensor as read and written
once, by kernels fused as far as the matrix products allow (for a single replica the L2 cache saves some).

The losses of one seed are compared over the widths: the number of first steps with equal bits, and the largest
difference.

python -m benchmarks.student_teacher [--replicas 1 8 64] [--teachers code paper] [--steps 2000] [--json PATH]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.report import measured, options_of, show
from benchmarks.timing import bandwidth, rate
from mxstudy import config
from mxstudy.students import train as student_teacher
from mxstudy.students.stack import Stack
from mxstudy.tracking.columnar_journal import ROWS, read_columns
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.journal import read_journal
from mxstudy.train.runtime import configure_torch, resolve_device

SIZES = {
    "paper": {"model": {"hidden_size": 512, "num_layers": 4}, "train": {"batch_size": 2048}},
    "tiny": {"model": {"hidden_size": 32, "num_layers": 1}, "train": {"batch_size": 32, "compile": False}},
}


def configured(size: str, replicas: int, teacher: str, steps: int, **train: Any) -> config.StudentTeacher:
    """Return the config of a run in MXFP8 by the MX specification.

    A run of at most ROWS steps stops half way for a checkpoint, so that its second half can be timed.
    """
    sizes = SIZES[size]
    values = {
        "study": "student_teacher",
        "seeds": list(range(replicas)),
        "model": {"kind": "residual_mlp"} | sizes["model"],
        "norm": {"kind": "layernorm", "bias": True},
        "precision": {"schedule": [{"plan": {"layers.*": "mxfp8"}}]},
        "teacher": {"kind": teacher},
        "optimizer": {"kind": "adam"},
        "schedule": {"kind": "constant", "warmup_fraction": 0.0},
        "train": sizes["train"] | {"steps": steps} | train,
        "checkpoint": {"every_steps": 0 if steps > ROWS else steps // 2},
        "tracking": {"uri": None},
    }
    return cast(config.StudentTeacher, config.read_run(values))


def study(run: config.StudentTeacher, path: Path) -> tuple[float, np.ndarray]:
    """Do the run as the study does, and return steps x replicas per second, and the losses [steps, S]."""
    folder = RunFolder.create(path, run, "0" * 64, {"label": "benchmark", "choices": {}})
    student_teacher.run(run, folder, f"{len(run.replicas)} replicas, teacher {run.teacher.kind}")
    rows = [row for row in read_journal(folder.journal_path) if row.get("probe") == "replicas"]
    first = max(row["step"] for row in rows if row["step"] < (run.checkpoint.every_steps or ROWS))
    (began,) = (row for row in rows if row["step"] == first)
    seconds = rows[-1]["time_s"] - began["time_s"]
    steps = run.train.steps - (run.checkpoint.every_steps or ROWS)
    return steps * len(run.replicas) / seconds, read_columns(folder.columns, len(run.replicas))[:, 0]


def replayed(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the same function without launch overhead, on a GPU as a CUDA graph's replay."""
    if device.type != "cuda":
        return function
    function()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def eager(run: config.StudentTeacher, device: torch.device, least_s: float) -> float:
    """Return the eager step's rate in steps x replicas per second."""
    return len(run.replicas) * rate(Stack(run, device).eager_step, device, least_s)


def ceiling(run: config.StudentTeacher, device: torch.device, least_s: float) -> float:
    """Return an upper bound on steps x replicas per second.

    The teacher, shared by all replicas, is not counted.
    """
    per_s = rate(replayed(gemms(run, device), device), device, least_s)
    seconds = 1 / per_s + len(run.replicas) * moved_bytes(run) / bandwidth(device, least_s)
    return len(run.replicas) / seconds


def gemms(run: config.StudentTeacher, device: torch.device) -> Callable[[], object]:
    """Return a function that computes the three GEMMs of every linear of all replicas."""
    model, count = run.model, len(run.replicas)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def operand(*shape: int) -> torch.Tensor:
        return torch.randn(count, *shape, device=device, dtype=dtype)

    x, h = operand(run.train.batch_size, model.hidden_size), operand(run.train.batch_size, model.ffn_size)
    up, down = operand(model.ffn_size, model.hidden_size), operand(model.hidden_size, model.ffn_size)

    def products() -> None:
        for _ in range(model.num_layers):
            for a, w in ((x, up), (h, down)):
                d = h if a is x else x
                torch.bmm(a, w.mT), torch.bmm(d, w), torch.bmm(d.mT, a)

    return products


def moved_bytes(run: config.StudentTeacher) -> int:
    """Return the bytes that a replica's step moves outside of matrix products.

    Operands are bf16 and cast once for both axes.
    """
    model, samples = run.model, run.train.batch_size
    thin, wide = samples * model.hidden_size, samples * model.ffn_size
    norm = 2 + 4 + 4 + 2 * 2  # branch and stream in; stream and two operands out
    norm_backward = 2 + 4 + 4 + 4  # gradient, stream, its gradient in; its gradient out
    cast_gradient = 4 + 2 * 2
    activation = 2 + 2 * 2
    activation_backward = 2 + 2 + 2 * 2
    adam = 2 + 3 * 4 + 3 * 4 + 2 * 2  # gradient, weight, two moments in; all but the gradient out, and two operands
    layer = (norm + norm_backward + cast_gradient) * thin + (activation + activation_backward) * wide
    return model.num_layers * (layer + adam * 2 * model.hidden_size * model.ffn_size)


def measure(
    size: str, replicas: Sequence[int], teachers: Sequence[str], steps: int, least_s: float
) -> list[dict[str, Any]]:
    """Return a row per teacher and width. Losses are compared with those of the first width."""
    device, rows = resolve_device("auto"), []
    for teacher in teachers:
        narrow: np.ndarray | None = None
        for count in replicas:
            run = configured(size, count, teacher, steps)
            with tempfile.TemporaryDirectory() as name:
                rate_of_study, losses = study(run, Path(name) / "run")
            configure_torch(compile=False)
            slow = eager(configured(size, count, teacher, steps, compile=False), device, least_s)
            configure_torch(compile=False)
            bound = ceiling(run, device, least_s)
            narrow = losses[:, 0] if narrow is None else narrow
            row = {"teacher": teacher, "replicas": count, "study": rate_of_study, "eager": slow, "ceiling": bound}
            rows.append(row | {"of_ceiling": rate_of_study / bound} | compared(losses[:, 0], narrow))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def compared(losses: np.ndarray, narrow: np.ndarray) -> dict[str, Any]:
    """Return the number of first steps with the first width's bits, and the largest difference of a seed's losses."""
    same = np.logical_and.accumulate(losses == narrow)
    return {"equal_steps": int(same.sum()), "largest_difference": float(np.max(np.abs(losses / narrow - 1)))}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("student_teacher", __doc__)
    parser.add_argument("--size", choices=SIZES, default="paper")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--teachers", nargs="+", default=["code", "paper"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=3.0, help="time per measurement other than the study's")
    chosen = parser.parse_args(arguments)
    rows = measure(chosen.size, chosen.replicas, chosen.teachers, chosen.steps, chosen.seconds)
    show(rows)
    measured(rows, chosen.json, size=chosen.size, steps=chosen.steps)


if __name__ == "__main__":
    main()
