"""Measure many small runs on one GPU: total tokens/s of 1, 2, 4 and 8 processes that train llama_23m at the same time.

Each process is a training of its own, as the launcher's `jobs_per_gpu` starts them: the loop, batches that are dealt
and gathered, the journal. All have one seed, so all must have the bits of the first, which does its first steps alone.
All processes exist from the start, and in each turn the first k of them train for some seconds. The GPU switches
between processes in time slices. With NVIDIA's MPS, if the machine has its daemon, their kernels may run at once.

python -m benchmarks.side_by_side [--runs 1 2 4 8] [--sharing slices mps] [--seconds 12] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_log import GpuLog, Span, shown
from benchmarks.report import measured, options_of, show, training_options
from benchmarks.training import LLAMAS, Written, build, everywhere, model_of, pretraining
from mxstudy import config
from mxstudy.data.batches import Batches
from mxstudy.launch.freeze import PACKAGE
from mxstudy.probes.stragglers import peak_gib
from mxstudy.studies.pretrain.built import sampling_of
from mxstudy.tracking.journal import Journal
from mxstudy.train.loop import TrainingRun, begin_step, record_steps
from mxstudy.train.runtime import configure_torch, resolve_device

FIRST_STEPS = 20  # the first of them compiles; after the last, losses are compared
CORPUS_TOKENS = 2**24
DAEMON = "nvidia-cuda-mps-control"


# ---------------------------------------------------------------------------------------------------- in each process


class RandomShards:
    """Random shards of one corpus, in memory."""

    def __init__(self, vocabulary: int) -> None:
        self.drawn = np.random.default_rng(0).integers(vocabulary, size=CORPUS_TOKENS, dtype=np.uint16)

    def tokens(self, split: str) -> np.ndarray:
        return self.drawn


def settings_of(options: argparse.Namespace) -> config.Pretrain:
    train = config.Train(
        steps=10**5,
        batch_size=options.batch,
        sequence_length=options.sequence,
        compile=not options.eager,
        device=options.device,
        deterministic=options.deterministic,
    )
    return pretraining(model_of(options.model), config.RMSNorm(), everywhere(options.precision), train, lr=1e-3)


def work(options: argparse.Namespace) -> None:
    """Train for the seconds that each line of standard input names, and answer each line with a line of JSON."""
    began_s = time.perf_counter()
    settings = settings_of(options)
    device = resolve_device(options.device)
    configure_torch(settings.train.compile, settings.train.deterministic)
    shards: Any = {"pysource": RandomShards(settings.model.vocab_size)}
    with tempfile.TemporaryDirectory() as folder:
        recorder = Written(Journal(Path(folder) / "metrics.jsonl"))
        batches = Batches(shards, sampling_of(settings), settings.train.sequence_length)
        run = replace(build(settings, device, recorder), batches=batches)
        for step in range(FIRST_STEPS - 1):
            begin_step(run, step)
            record_steps(run, run.ahead)
        record_steps(run)
        begin_step(run, FIRST_STEPS - 1)
        loss = run.unread[0].view.loss
        record_steps(run)
        answer(loss=loss.hex(), start_s=time.perf_counter() - began_s, peak_gib=peak_gib(device))
        step = FIRST_STEPS
        for line in sys.stdin:
            step = answer_turn(run, step, float(line))


def answer_turn(run: TrainingRun, step: int, seconds: float) -> int:
    """Train for `seconds` from `step` on, report the number of steps, and return the next step."""
    first, began_s = step, time.perf_counter()
    while time.perf_counter() - began_s < seconds:
        begin_step(run, step)
        record_steps(run, run.ahead)
        step += 1
    record_steps(run)
    took_s = time.perf_counter() - began_s
    answer(tokens=(step - first) * run.tokens_per_step, seconds=took_s)
    return step


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


# ------------------------------------------------------------------------------------------- the process that measures


class Process:
    """A training in a process of its own."""

    def __init__(self, arguments: Sequence[str], stack: ExitStack) -> None:
        words = [sys.executable, "-m", "benchmarks.side_by_side", "--work", *arguments]
        path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        pipe, own = subprocess.PIPE, os.environ | {"PYTHONPATH": path}
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=own)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)

    def train(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """Return the process's next answer, or None if it has ended, for example because memory ran out."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


@contextmanager
def time_slices() -> Iterator[None]:
    """Leave sharing to the driver, which gives the GPU to one process after the other."""
    yield


@contextmanager
def mps() -> Iterator[None]:
    """Run a daemon of NVIDIA's MPS within the block, and point the processes to it."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([DAEMON, "-d"], env=os.environ | own, check=True)
        os.environ.update(own)
        try:
            yield
        finally:
            subprocess.run([DAEMON], input="quit\n", text=True, env=os.environ, check=True)
            for name in own:
                del os.environ[name]


SHARING = {"slices": time_slices, "mps": mps}


def measure(
    sharing: str, runs: Sequence[int], arguments: Sequence[str], seconds: float, log: GpuLog
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of processes, as soon as it is measured."""
    with SHARING[sharing](), ExitStack() as stack:
        processes = [Process(arguments, stack)]
        started = [processes[0].answer()]  # the first runs alone, and fills Inductor's cache for the others
        processes += [Process(arguments, stack) for _ in range(max(runs) - 1)]
        started += [process.answer() for process in processes[1:]]
        there = [(process, first) for process, first in zip(processes, started, strict=True) if first is not None]
        if not there:
            print(f"{sharing}: no process trained; their messages are above", flush=True)
            return
        losses = {first["loss"] for _, first in there}
        print(
            f"{sharing}: {len(there)} of {max(runs)} processes are there, with {there[0][1]['peak_gib']:.1f} GiB each; "
            f"first steps: {'the same bits in all' if len(losses) == 1 else 'DIFFERENT BITS'}; start "
            f"{there[0][1]['start_s']:.0f} s alone, {there[-1][1]['start_s']:.0f} s with others",
            flush=True,
        )
        for count in (count for count in runs if count <= len(there)):
            began_s = time.perf_counter()
            for process, _ in there[:count]:
                process.train(seconds)
            turns = [turn for process, _ in there[:count] if (turn := process.answer())]
            rates = [turn["tokens"] / turn["seconds"] for turn in turns]
            row = {"sharing": sharing, "runs": len(turns), "tokens_per_s": sum(rates)}
            row |= {"least_of_one": min(rates), "most_of_one": max(rates), "same_bits": len(losses) == 1}
            yield row | log.over([Span(began_s, time.perf_counter())])


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = options_of("side_by_side", __doc__)
    parser.add_argument("--model", choices=LLAMAS, default="llama_23m", metavar="MODEL", help="a file of conf/model")
    parser.add_argument("--precision", default="mxfp8", help="a recipe by its name")
    parser.add_argument("--batch", type=int, default=64, help="sequences per step")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 2, 4, 8], help="processes at once")
    parser.add_argument("--sharing", nargs="+", choices=SHARING, default=list(SHARING))
    parser.add_argument("--seconds", type=float, default=12.0, help="of each turn")
    parser.add_argument("--deterministic", action="store_true", help="with train.deterministic")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    training_options(parser)
    chosen = parser.parse_args(words)
    if chosen.work:
        work(chosen)
        return
    sharing = [each for each in chosen.sharing if each != "mps" or shutil.which(DAEMON)]
    if sharing != chosen.sharing:
        print(f"without MPS: this machine has no {DAEMON}")
    device = resolve_device(chosen.device)  # by name: a process that finds no GPU would train on the CPU, for minutes
    own = ["--model", chosen.model, "--precision", chosen.precision, "--device", device.type]
    own += ["--batch", str(chosen.batch), "--sequence", str(chosen.sequence), *(["--eager"] if chosen.eager else [])]
    own += ["--deterministic"] if chosen.deterministic else []
    rows: list[dict[str, Any]] = []
    with GpuLog(device) as log:
        for each in sharing:
            for row in measure(each, chosen.runs, own, chosen.seconds, log):
                rows.append(row)
                show([shown(row)])
    if not rows:
        raise SystemExit("side_by_side: no process trained; their messages are above")
    show([shown(row) for row in rows])
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    about = {"model": chosen.model, "precision": chosen.precision, "batch": chosen.batch, "sequence": chosen.sequence}
    about |= {"deterministic": chosen.deterministic}
    measured(rows, chosen.json, **about, seconds=chosen.seconds, device_name=gpu, cores=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    main()
