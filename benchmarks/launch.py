"""Measure the launch time of a sweep, from the shell until all jobs are composed, checked, frozen and in Slurm's queue.

    python -m benchmarks.launch --json results/launch.json

There are two sweeps, of 500 and of 504 jobs. The first varies values (learning rate and seed). In the second, each job
has its own group choices (model, precision and schedule). With SLURM_CONF, jobs are submitted to that Slurm on hold and
then cancelled. Without it, a stand-in for sbatch answers at once, and the queue's own time is not counted. Two commands
that only print are timed as well: a dry run of a sweep, and the config of an experiment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import measured, show
from mxstudy.launch.freeze import PACKAGE

EXPERIMENT = ("+experiment=mxnorm_pretrain", "data=pysource", "tokenizer=bytes", "tracking=none", "norm=rmsnorm")
ON_SLURM = ("hydra/launcher=slurm", "hydra.launcher.gpus_per_node=0", "hydra.launcher.sbatch=[--hold]")
MODELS = ("llama_23m", "llama_125m", "llama_250m", "llama_1b")
SCHEDULES = ("cosine", "cosine_no_warmup", "linear", "wsd", "constant", "constant_no_warmup")
PRECISIONS = (
    *("bf16", "fp8_tensor", "mx_mix", "mxfp4", "mxfp6_e2m3", "mxfp6_e2m3_bf16_act", "mxfp6_e3m2", "mxfp8"),
    *("mxfp8_act_only", "mxfp8_backward_only", "mxfp8_bf16_act", "mxfp8_bf16_act_fwd", "mxfp8_bf16_weight"),
    *("mxfp8_e5m2", "mxfp8_e5m2_act", "mxfp8_e5m2_act_grad", "mxfp8_e5m2_bf16_act", "mxfp8_e5m2_forward_only"),
    *("mxfp8_e5m2_grad", "mxfp8_e5m2_weight", "mxfp8_forward_only"),
)
PRINTING = {"dry run": ("+sweep=mitigations", "dry_run=true"), "config": ("+experiment=quickstart", "--cfg", "job")}
STAND_INS = {"sbatch": "echo Submitted batch job 1", "squeue": "true", "srun": "true", "scancel": "true"}


def values(jobs: int) -> list[str]:
    """Return the command-line words of a sweep of `jobs` jobs, a multiple of 5: five seeds of each learning rate."""
    return [f"optimizer.lr={','.join(f'{n + 1}e-6' for n in range(jobs // 5))}", "seed=0,1,2,3,4"]


def groups(jobs: int) -> list[str]:
    """Return a sweep's words, of at least `jobs` jobs and at most 504, over models, precisions and schedules."""
    shared = len(MODELS) * len(SCHEDULES)
    models, precisions = (MODELS, -(-jobs // shared)) if jobs >= shared else (MODELS[: -(-jobs // len(SCHEDULES))], 1)
    return [
        f"model={','.join(models)}",
        f"precision={','.join(PRECISIONS[:precisions])}",
        f"schedule={','.join(SCHEDULES)}",
    ]


SWEEPS = {"values": values, "groups": groups}


def run(words: Sequence[str], environment: dict[str, str]) -> tuple[list[str], float]:
    """Run mxstudy with these words in an empty folder. Return the lines that it printed and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mxstudy", *words]
        began_s = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
        return done.stdout.splitlines(), time.perf_counter() - began_s


def submit(words: Sequence[str], environment: dict[str, str]) -> tuple[int, float]:
    """Submit a sweep and cancel it. Return the number of submitted jobs and the seconds that submitting took."""
    lines, seconds = run([*EXPERIMENT, *words, *ON_SLURM], environment)
    subprocess.run(["scancel", *{line.split("_")[0] for line in lines[1:-1]}], env=environment, check=True)
    return int(lines[-1].split()[0]), seconds


def of_rounds(seconds: list[float]) -> dict[str, Any]:
    return {"fastest_s": min(seconds), "slowest_s": max(seconds), "rounds_s": seconds}


def slurm_or_stand_in(folder: Path) -> dict[str, str]:
    """Return the commands' environment. Without SLURM_CONF it has stand-ins for Slurm's commands on the PATH."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "HF_HUB_OFFLINE": "1"}
    if "SLURM_CONF" not in os.environ:
        for name, line in STAND_INS.items():
            (folder / name).write_text(f"#!/bin/sh\n{line}\n")
            (folder / name).chmod(0o755)
        environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    return environment


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3, help="rounds per sweep; the fastest and the slowest are shown")
    parser.add_argument("--json", type=Path, default=Path("figures/launch.json"))
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = slurm_or_stand_in(Path(folder))
        for name, words in SWEEPS.items():
            rounds = [submit(words(options.jobs), environment) for _ in range(options.rounds)]
            rows.append({"vary_in": name, "jobs": rounds[0][0], **of_rounds([seconds for _, seconds in rounds])})
        for name, command in PRINTING.items():
            seconds = [run(command, environment)[1] for _ in range(options.rounds)]
            rows.append({"prints": name, "command": " ".join(command), **of_rounds(seconds)})
    show(rows, without=["rounds_s"])
    queue = "Slurm" if "SLURM_CONF" in os.environ else "a stand-in for sbatch"
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    measured(rows, options.json, queue=queue, cores=cores, load=load)


if __name__ == "__main__":
    main()
