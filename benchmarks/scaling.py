"""Measure weak scaling: the same work per GPU on 1, 2, 4 and 8 GPUs of this machine, in bf16 and in MXFP8.

Each case is a separate run of the training code under torchrun. Tokens are random, and nothing is saved. Efficiency is
tokens/s per GPU divided by that of one GPU in the same precision. A single GPU does not shard its model, so efficiency
includes the whole cost of sharding. Finished cases are kept beside the JSON: after a call that was cut off, the next
one measures what is missing, and calls with other settings add to the table.

python -m benchmarks.scaling [--model llama_1b] [--gpus 1 2 4 8] [--precisions bf16 mxfp8] [--json PATH]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept import Kept
from benchmarks.report import measured, options_of, show, training_options
from benchmarks.timing import median_and_spread
from benchmarks.training import LLAMAS, build, everywhere, model_of, pretraining
from mxstudy import config
from mxstudy.distributed import is_first, largest_over_ranks, world_size
from mxstudy.model.backends import backends_of
from mxstudy.probes.stragglers import peak_gib
from mxstudy.reader import read
from mxstudy.tracking.folder import RunFolder
from mxstudy.tracking.mixed_backends import all_backends
from mxstudy.train.loop import TrainingRun, train_step
from mxstudy.train.process_group import process_group
from mxstudy.train.runtime import configure_torch, resolve_device

JSON_ONLY = ("steps", "warmup_steps", "compile", "device", "parameters")  # columns that the terminal does not show


@dataclass(frozen=True)
class Case:
    """A case of the benchmark.

    Each GPU has `batch_size` sequences per step, in micro-batches of `micro_batch_size`.
    """

    model: str
    precision: str
    gpus: int
    batch_size: int
    micro_batch_size: int
    sequence_length: int
    steps: int
    warmup_steps: int
    activation_checkpointing: str
    compile: bool
    device: str

    def settings(self) -> config.Pretrain:
        train = {
            "steps": self.warmup_steps + self.steps,
            "batch_size": self.batch_size * self.gpus,
            "micro_batch_size": self.micro_batch_size,
            "sequence_length": self.sequence_length,
            "activation_checkpointing": self.activation_checkpointing,
            "compile": self.compile,
            "device": self.device,
        }
        norm = config.RMSNorm() if self.precision == "bf16" else config.MXNorm(p=2.0)
        return pretraining(model_of(self.model), norm, everywhere(self.precision), read(config.Train, train), lr=1e-4)


# ------------------------------------------------------------------------------------------------------ in each rank


def work(case: Case, path: Path) -> None:
    """Build the model, warm up and do the steps. The first rank writes the case's row to `path`."""
    device = resolve_device(case.device)
    configure_torch(case.compile)
    with process_group(device, RunFolder(path.parent)):
        assert world_size() == case.gpus
        began_s = time.perf_counter()
        run = build(case.settings(), device)
        build_s = time.perf_counter() - began_s
        losses, seconds = zip(*(timed_step(run, step) for step in range(case.warmup_steps + case.steps)), strict=True)
        peak = largest_over_ranks({"peak_gib": peak_gib(device)})
        if is_first():
            row = row_of(case, run, np.array(seconds[case.warmup_steps :])) | peak
            path.write_text(json.dumps(row | {"build_s": build_s, "warmup_s": seconds[0], "loss": losses[-1]}))


def timed_step(run: TrainingRun, step: int) -> tuple[float, float]:
    """Do a step, and return its loss and the seconds until the host has the loss.

    The GPU may still be working then; the next step waits for it.
    """
    began_s = time.perf_counter()
    loss = train_step(run, step).loss
    return loss, time.perf_counter() - began_s


def row_of(case: Case, run: TrainingRun, seconds: np.ndarray) -> dict[str, Any]:
    step_s, spread_s = median_and_spread(seconds)
    tokens_per_s = run.tokens_per_step / step_s
    flops_per_s = run.model.flops_per_token(case.sequence_length) * tokens_per_s
    return asdict(case) | {
        "backend": all_backends(backends_of(run.model).values()),
        "parameters": run.model.num_params(),
        "step_ms": step_s * 1e3,
        "spread_ms": spread_s * 1e3,
        "tokens_per_s_a_gpu": tokens_per_s / case.gpus,
        "mfu": flops_per_s / (run.peak_flops * case.gpus) if run.peak_flops else None,
    }


# ---------------------------------------------------------------------------------------- in the launching process


def run_case(case: Case, module: str = "benchmarks.scaling") -> dict[str, Any]:
    """Run a case of that benchmark under torchrun and return its row.

    Raises CalledProcessError if it fails, for example because memory runs out.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.gpus)]
    threads = max(1, (os.cpu_count() or 1) // case.gpus)  # with torchrun's default of 1, drawing weights takes minutes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [*torchrun, "-m", module, "--work", json.dumps(asdict(case)), str(path)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        return json.loads(path.read_text())


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with their efficiency.

    It is None if one GPU was not measured with the same settings, or if that case failed.
    """

    def settings(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[each.name] for each in fields(Case) if each.name != "gpus")

    speed = "tokens_per_s_a_gpu"
    alone = {settings(row): row[speed] for row in rows if row["gpus"] == 1 and speed in row}

    def efficiency(row: dict[str, Any]) -> float | None:
        return row[speed] / alone[settings(row)] if speed in row and settings(row) in alone else None

    return [row | {"efficiency": efficiency(row)} for row in rows]


def measure(cases: Iterable[Case], kept: Kept) -> list[dict[str, Any]]:
    """Measure what is missing, and return all kept rows.

    A failed case adds a row with `error`, and the next call tries it again.
    """
    failed: list[dict[str, Any]] = []
    for case in cases:
        if kept.has(**asdict(case)):
            continue
        try:
            kept.add(run_case(case))
            tell(kept.rows[-1:])
        except subprocess.CalledProcessError as error:
            failed.append(asdict(case) | {"error": f"torchrun exited with {error.returncode}; see its output above"})
    return with_efficiency(kept.rows + failed)


def tell(rows: list[dict[str, Any]]) -> None:
    show(rows, without=JSON_ONLY)


def case_options(name: str, shows: str | None) -> argparse.ArgumentParser:
    """Return the parser of the benchmark of that name, whose cases run under torchrun. `settings_of` reads them."""
    parser = options_of(name, shows)
    parser.add_argument("--model", choices=LLAMAS, default="llama_1b", metavar="MODEL", help="a file of conf/model")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per GPU and step")
    parser.add_argument("--micro-batch-size", type=int, help="sequences per micro-batch; default: all")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup-steps", type=int, default=5, help="the first one compiles")
    parser.add_argument("--work", nargs=2, metavar=("CASE", "PATH"), help=argparse.SUPPRESS)
    return parser


def settings_of(chosen: argparse.Namespace, case: type[Case], **others: Any) -> dict[str, Any]:
    """Return the settings of a case that the options choose, together with `others`."""
    values = vars(chosen) | {"micro_batch_size": chosen.micro_batch_size or chosen.batch_size} | others
    return {each.name: values[each.name] for each in fields(case) if each.name in values}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = case_options("scaling", __doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "mxfp8"])
    parser.add_argument("--activation-checkpointing", choices=["none", "full"], default="none")
    training_options(parser)
    chosen = parser.parse_args(arguments)
    if chosen.work:
        work(Case(**json.loads(chosen.work[0])), Path(chosen.work[1]))
        return
    cases = [
        Case(**settings_of(chosen, Case, precision=precision, gpus=gpus, compile=not chosen.eager))
        for gpus, precision in itertools.product(chosen.gpus, chosen.precisions)
    ]
    rows = measure(cases, Kept(chosen.json, resolve_device(chosen.device)))
    tell(rows)
    measured(rows, chosen.json)
    failed = sum("error" in row for row in rows)
    if failed:
        sys.exit(f"{failed} of {len(rows)} cases failed; repeat the command to try them again")


if __name__ == "__main__":
    main()
