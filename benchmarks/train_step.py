"""Cost of a training step in emulated MXFP8 over one in bf16: with our kernels, module by module, and with torchao.

bf16: RMSNorm, nothing quantised. mxfp8: our kernels, with RMSNorm and with MXNorm (p=2). sr_rht_2d: MXFP8 with
stochastic rounding of output gradients, 16 x 16 blocks of weights and a Hadamard transform of 16 in wgrad. plain: the
modules one after another, left to the compiler. torchao: linears that multiply torchao's MXTensors. All arms train the
same model, in turns, so that a GPU that warms up does so for all; all are compiled block by block, with all roundings
kept. The tokens are random.

over_bf16 is an arm's time over that of bf16 in the same round, the median over the rounds; its spread is half the
interquartile range. Peak memory is that of a step, weights and optimizer included. MFU is relative to the data sheet's
dense bf16 rate, with 6 FLOP per matmul parameter and token, without the input embedding, plus causal attention. The
floor is the time of the bytes that our kernels move in addition to those of bf16, at the bandwidth of a copy.

python -m benchmarks.train_step [--model llama_1b] [--ffn 3072] [--vocabulary 32000] [--profile] [--json PATH]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import yaml

from benchmarks.probes import RandomTokens
from benchmarks.report import json_option, measured, show, training_options
from benchmarks.scaling import LLAMAS, MODELS, Silent, model_of
from benchmarks.student_teacher import bandwidth
from benchmarks.timing import synchronize
from benchmarks.torchao_linear import use_torchao
from mxstudy import config
from mxstudy.model.decoder import Decoder
from mxstudy.model.feed_forward import MLPS
from mxstudy.model.precision import DTYPES
from mxstudy.probes.memory import GIB
from mxstudy.reader import read
from mxstudy.train.loop import TrainingRun, set_precision, train_step
from mxstudy.train.optimizer import build_optimizer
from mxstudy.train.parallel import parallelize
from mxstudy.train.runtime import configure_torch, resolve_device

WARMUP_ROUNDS = 3  # the first compiles
BATCH_SIZES = {"llama_125m": 16, "llama_1b": 8}  # sequences of 4096 that fit on a GPU with 141 GB


class Arm(NamedTuple):
    """An arm; `precision`: a file of conf/precision; `torchao`: whether its linears are replaced by torchao's."""

    norm: config.Norm
    precision: str
    backend: str = "auto"
    torchao: bool = False


RMSNORM, MXNORM = config.RMSNorm(), config.MXNorm(p=2.0)
ARMS = {
    "bf16": Arm(RMSNORM, "bf16"),
    "mxfp8, rmsnorm": Arm(RMSNORM, "mxfp8"),
    "mxfp8, mxnorm_p2": Arm(MXNORM, "mxfp8"),
    "sr_rht_2d, rmsnorm": Arm(RMSNORM, "mxfp8_sr_rht_2d"),
    "plain, rmsnorm": Arm(RMSNORM, "mxfp8", "reference"),
    "plain, mxnorm_p2": Arm(MXNORM, "mxfp8", "reference"),
    "plain sr_rht_2d, rmsnorm": Arm(RMSNORM, "mxfp8_sr_rht_2d", "reference"),
    "torchao, rmsnorm": Arm(RMSNORM, "bf16", torchao=True),
}


def precision_of(arm: Arm) -> config.Precision:
    """Return the precision of the arm's file in conf/precision."""
    values = yaml.safe_load((MODELS.parent / "precision" / f"{arm.precision}.yaml").read_text())
    values.pop("defaults")
    return cast(config.Precision, read(config.Precision, values | {"backend": arm.backend}, "precision"))


@dataclass(frozen=True)
class Case:
    """The case that all arms share: a step has `batch_size` sequences in one micro-batch."""

    model: config.Decoder
    batch_size: int
    sequence_length: int
    checkpointing: str
    compile: bool
    device: str

    def settings(self, arm: Arm) -> config.Pretrain:
        train = config.Train(
            steps=10**6,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            compile=self.compile,
            activation_checkpointing=self.checkpointing,  # type: ignore[arg-type]
        )
        return config.Pretrain(
            model=self.model,
            norm=arm.norm,
            precision=precision_of(arm),
            data=config.PySource(),
            tokenizer=config.Bytes(),
            optimizer=config.AdamW(lr=1e-5),
            schedule=config.Schedule(kind="constant"),
            train=train,
        )


def build(case: Case, names: Sequence[str]) -> dict[str, TrainingRun]:
    """Return a run per arm; all share the same parameter and optimizer objects, so memory holds only one model."""
    device = resolve_device(case.device)
    configure_torch(case.compile)
    torch._dynamo.config.automatic_dynamic_shapes = False  # else floats that differ between arms become dynamic
    torch._dynamo.config.recompile_limit = 8 * len(names)  # all arms share the same code objects
    runs: dict[str, TrainingRun] = {}
    for name in names:
        settings = case.settings(ARMS[name])
        with torch.device("meta"):
            model = Decoder(settings.model, settings.norm, settings.precision.settings, DTYPES[settings.train.compute])
        if runs:
            first = next(iter(runs.values()))
            model.load_state_dict(first.model.state_dict(keep_vars=True), assign=True)
            optimizer = first.optimizer
        else:
            model.to_empty(device=device).init_weights(settings.seed)
            optimizer = build_optimizer(model, settings.optimizer)
        set_precision(model, settings, 0, device)
        if ARMS[name].torchao:
            use_torchao(model)
        parallelize(model, settings.train)
        tokens = RandomTokens(settings.model, settings.train)
        runs[name] = TrainingRun(settings, model, optimizer, tokens, device, Silent())  # type: ignore[arg-type]
    return runs


def timed_step(run: TrainingRun, step: int) -> tuple[float, float]:
    """Do a step; returns its seconds from idle GPU to idle GPU, and its peak memory in GiB (0 on CPU)."""
    synchronize(run.device)
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    began_s = time.perf_counter()
    train_step(run, step)
    synchronize(run.device)
    seconds = time.perf_counter() - began_s
    return seconds, torch.cuda.max_memory_allocated(run.device) / GIB if run.device.type == "cuda" else 0.0


def measure(runs: dict[str, TrainingRun], least_s: float) -> list[dict[str, Any]]:
    """Return a row per arm, from rounds that take `least_s` per arm, and at least three rounds."""
    for step in range(WARMUP_ROUNDS):
        for name, run in runs.items():
            seconds, _ = timed_step(run, step)
            print(f"warm-up {step}: {name} {seconds:.3f} s", flush=True)
    rounds: list[list[tuple[float, float]]] = []
    began_s = time.perf_counter()
    while len(rounds) < 3 or time.perf_counter() - began_s < least_s * len(runs):
        rounds.append([timed_step(run, WARMUP_ROUNDS + len(rounds)) for run in runs.values()])
    seconds, peaks = np.array(rounds).transpose(2, 1, 0)  # [arms, rounds]
    return [row_of(*of, seconds[0], peaks[0]) for of in zip(runs, runs.values(), seconds, peaks, strict=True)]


def row_of(
    name: str, run: TrainingRun, seconds: np.ndarray, peaks: np.ndarray, first_s: np.ndarray, first_peaks: np.ndarray
) -> dict[str, Any]:
    """Return an arm's row; `first_s` and `first_peaks`: seconds and peaks of the first arm, bf16."""
    step_s, spread_s = median_and_spread(seconds)
    ratio, ratio_spread = median_and_spread(seconds / first_s)
    tokens_per_s = run.tokens_per_step / step_s
    flops_per_s = run.model.flops_per_token(run.config.train.sequence_length) * tokens_per_s
    return {
        "arm": name,
        "step_ms": step_s * 1e3,
        "spread_ms": spread_s * 1e3,
        "over_bf16": ratio,
        "over_bf16_spread": ratio_spread,
        "peak_gib": peaks.max() if first_peaks.any() else None,
        "peak_over_bf16": peaks.max() / first_peaks.max() if first_peaks.any() else None,
        "tokens_per_s": tokens_per_s,
        "mfu": flops_per_s / run.peak_flops if run.peak_flops else None,
        "rounds": len(seconds),
    }


def median_and_spread(values: np.ndarray) -> tuple[float, float]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(middle), float(high - low) / 2


def more_bytes(model: config.Decoder, tokens: int) -> int:
    """Return the bytes that a step in MXFP8 moves in addition to those of bf16, outside of GEMMs.

    Per block and token: the heads' output is cast twice, with its own read and write each time; the gradients of both
    outputs are read once and written twice; those of both inputs, computed anyway, are written once more. The backward
    recomputes the norms' and the activation's outputs in bf16 too. A weight is read and cast again in the backward.
    """
    kv_size = model.num_kv_heads * model.hidden_size // model.num_heads
    inner = MLPS[model.mlp].parts * model.ffn_size
    thin, qkv = model.hidden_size, model.hidden_size + 2 * kv_size
    a_token = 2 * ((2 * 2 + 2 * 3) * thin + qkv + inner)
    weights = thin * (qkv + thin + inner + model.ffn_size)
    return model.num_layers * (tokens * a_token + (4 + 2) * weights)


def kernels_of(run: TrainingRun, most: int = 30) -> list[dict[str, Any]]:
    """Return the device time of one step by kernel, the `most` longest first, and their total."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, activity.CUDA] if run.device.type == "cuda" else [activity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        train_step(run, 0)
        synchronize(run.device)
    cuda = run.device.type == "cuda"
    on_device = [e for e in profile.key_averages() if (e.device_type == torch.autograd.DeviceType.CUDA) == cuda]
    events = [e for e in on_device if not e.is_user_annotation]  # annotations are sums of other events
    times = [(e.self_device_time_total if cuda else e.self_cpu_time_total, e) for e in events]
    total = sum(time_us for time_us, _ in times)
    longest = sorted(times, key=lambda pair: -pair[0])[:most]
    return [
        {"kernel": e.key[:90], "calls": e.count, "ms": time_us / 1e3, "share": time_us / total}
        for time_us, e in longest
    ] + [{"kernel": "all", "calls": sum(e.count for _, e in times), "ms": total / 1e3, "share": 1.0}]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=LLAMAS, default="llama_125m", metavar="MODEL", help="a file of conf/model")
    parser.add_argument("--ffn", type=int, help="default: the model file's")
    parser.add_argument("--vocabulary", type=int, help="default: the model file's")
    parser.add_argument("--batch", type=int, help="sequences per step")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="bf16 always comes first"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="time per arm")
    parser.add_argument("--checkpointing", choices=["none", "full"], default="none")
    training_options(parser)
    parser.add_argument("--profile", action="store_true", help="also show each arm's longest kernels of a step")
    json_option(parser, "train_step")
    chosen = parser.parse_args(arguments)
    model = model_of(chosen.model)
    model = replace(model, ffn_size=chosen.ffn or model.ffn_size, vocab_size=chosen.vocabulary or model.vocab_size)
    batch_size = chosen.batch or BATCH_SIZES.get(chosen.model, 8)
    case = Case(model, batch_size, chosen.sequence, chosen.checkpointing, not chosen.eager, chosen.device)
    runs = build(case, list(dict.fromkeys(["bf16", *chosen.arms])))
    rows = measure(runs, chosen.seconds)
    copied_per_s = bandwidth(runs["bf16"].device, least_s=min(chosen.seconds, 1.0))
    floor = 1 + more_bytes(model, batch_size * chosen.sequence) / copied_per_s / (rows[0]["step_ms"] / 1e3)
    print(f"floor of mxfp8 over bf16, from the extra bytes at {copied_per_s / 1e12:.3f} TB/s: {floor:.4f}")
    kernels = {name: kernels_of(run) for name, run in runs.items()} if chosen.profile else {}
    for name, table in kernels.items():
        print(f"\n{name}")
        show(table)
    show(rows)
    sizes = {
        "ffn": model.ffn_size,
        "vocabulary": model.vocab_size,
        "batch": batch_size,
        "sequence": chosen.sequence,
    }
    sizes |= {"copied_bytes_per_s": copied_per_s, "floor_over_bf16": floor}
    settings = {"model": chosen.model, **sizes, "checkpointing": chosen.checkpointing, "compile": not chosen.eager}
    measured(rows, chosen.json, **settings, **({"kernels": kernels} if kernels else {}))


if __name__ == "__main__":
    main()
