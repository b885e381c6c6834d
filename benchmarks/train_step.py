"""Measure the cost of a training step in emulated MX formats over one in bf16 in the same kernels, and of bf16 itself.

bf16, fused: the baseline, in the fused functions that all arms with casts run in. bf16, inductor: module by module, as
a user of torch has it, compiled with Inductor's own settings; with roundings kept, as all other arms are; and
recomputing in the backward all but what GEMMs and the attention give. The fused functions recompute about as much, so
this arm shows the memory that recomputing saves without casts and kernels. full checkpointing: keeps a block's input
alone.
recomputing MLPs: --recompute-mlp blocks compute the product of their MLP's first linear again. Every arm computes head
and loss in the same chunks.
mxfp8, mxfp4: all six operands cast, RMSNorm or MXNorm (p=2). sr_rht_2d: MXFP8 with stochastic rounding of output
gradients, 16 x 16 blocks of weights and a Hadamard transform of 16 in wgrad. plain: the modules one after another, left
to the compiler. torchao: linears that multiply torchao's MXTensors. All arms train the same model, in turns, so that a
GPU that warms up does so for all; all are compiled block by block, and the final norm on its own. Tokens are random.

A round is four steps of each arm, which the host launches one behind the other, as it does in a training. over_bf16 is
an arm's time over the baseline's in the same round, the median over the rounds; its spread is half the interquartile
range. over_mxfp8 is the same over the arm "mxfp8, rmsnorm", if that is measured, for comparisons of FP4. Peak memory is
that of a step, weights and optimizer included. MFU is relative to the data sheet's dense bf16 rate, with 6 FLOP per
matmul parameter and token, without the input embedding, plus causal attention; nothing that is recomputed counts.
recomputed: the FLOPs of GEMMs and attention that the backward computes again, over those that count. sm_mhz, power_w
and temperature_c: least, median and largest reading within the arm's steps. The floor is the time of the bytes that the
kernels of MXFP8 move in addition to those of the baseline, at the bandwidth of a copy.

python -m benchmarks.train_step [--model llama_1b] [--ffn 3072] [--vocabulary 32000] [--profile] [--json PATH]
python -m benchmarks.train_step --model llama_1b --arms "bf16, fused, recomputing MLPs" --recompute-mlp 6
python -m benchmarks.train_step --arms "mxfp8, rmsnorm" "nvfp4, rmsnorm" "nvfp4 without random parts, rmsnorm"
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from omegaconf import OmegaConf

from benchmarks.gpu_log import GpuLog, shown
from benchmarks.inductor import OwnSettings, recompute_between_products
from benchmarks.kernel_times import shown_profiles
from benchmarks.report import measured, options_of, positive, show, training_options
from benchmarks.timing import Timed, bandwidth, median_and_spread, timed
from benchmarks.torchao_linear import use_torchao
from benchmarks.training import LLAMAS, MODELS, model_of, pretraining, training_run
from mxstudy import config
from mxstudy.model.backends import backends_of
from mxstudy.model.feed_forward import MLPS
from mxstudy.reader import read
from mxstudy.studies.pretrain.built import build_model
from mxstudy.studies.pretrain.check import flops_again
from mxstudy.tracking.mixed_backends import all_backends
from mxstudy.train.loop import TrainingRun, set_precision, train_step
from mxstudy.train.optimizer import build_optimizer
from mxstudy.train.parallel import parallelize
from mxstudy.train.runtime import configure_torch, resolve_device

WARMUP_ROUNDS = 3  # the first compiles
STEPS_A_ROUND = 4  # the host launches one behind the other, as in a training
RECOMPUTED = 7 / 16  # of the blocks; by arithmetic, llama_1b then needs 39 GiB in MXFP8, and in bf16 with 6 / 16
PROFILED = "also show each arm's longest kernels, and how long the GPU waits between kernels"
BATCH_SIZES = {"llama_125m": 16, "llama_1b": 8}  # sequences of 4096 that fit on a GPU with 141 GB


class Arm(NamedTuple):
    """An arm. `precision` is a file of conf/precision. `torchao` says that torchao's linears replace its own.

    `keeps` is what a block keeps for its backward: what its code saves, the same without its MLP's first product in
    some blocks, what GEMMs and the attention give, or its input. `own_settings` compiles it with Inductor's own
    settings, which drop roundings. `changes` are values of dotted keys that differ from the file's.
    """

    norm: config.Norm
    precision: str
    backend: str = "auto"
    torchao: bool = False
    keeps: Literal["saved", "less in MLPs", "products", "input"] = "saved"
    own_settings: bool = False
    changes: tuple[tuple[str, Any], ...] = ()


RMSNORM, MXNORM = config.RMSNorm(), config.MXNorm(p=2.0)
BASELINE = "bf16, fused"
MXFP8 = "mxfp8, rmsnorm"
ARMS = {
    BASELINE: Arm(RMSNORM, "bf16"),
    "bf16, inductor": Arm(RMSNORM, "bf16", "reference", own_settings=True),
    "bf16, inductor, roundings kept": Arm(RMSNORM, "bf16", "reference"),
    "bf16, inductor, recomputing": Arm(RMSNORM, "bf16", "reference", keeps="products"),
    "bf16, fused, full checkpointing": Arm(RMSNORM, "bf16", keeps="input"),
    MXFP8: Arm(RMSNORM, "mxfp8"),
    "mxfp8, mxnorm_p2": Arm(MXNORM, "mxfp8"),
    "mxfp4, rmsnorm": Arm(RMSNORM, "mxfp4"),
    "sr_rht_2d, rmsnorm": Arm(RMSNORM, "mxfp8_sr_rht_2d"),
    "plain, rmsnorm": Arm(RMSNORM, "mxfp8", "reference"),
    "plain, mxnorm_p2": Arm(MXNORM, "mxfp8", "reference"),
    "plain sr_rht_2d, rmsnorm": Arm(RMSNORM, "mxfp8_sr_rht_2d", "reference"),
    "torchao, rmsnorm": Arm(RMSNORM, "bf16", "reference", torchao=True),
}
NO_RANDOM = (("recipes.nvfp4.dgrad_dh.rounding", "even"), ("recipes.nvfp4.wgrad_transform", None))
ON_REQUEST = {
    "bf16, fused, recomputing MLPs": Arm(RMSNORM, "bf16", keeps="less in MLPs"),
    "mxfp8, rmsnorm, recomputing MLPs": Arm(RMSNORM, "mxfp8", keeps="less in MLPs"),
    "nvfp4, rmsnorm": Arm(RMSNORM, "nvfp4"),
    "nvfp4 without random parts, rmsnorm": Arm(RMSNORM, "nvfp4", changes=NO_RANDOM),
}
ALL_ARMS = ARMS | ON_REQUEST
FIRST = f"{BASELINE} is always the first; only on request: {'; '.join(ON_REQUEST)}"


def precision_of(arm: Arm) -> config.Precision:
    """Return the precision of the arm's file in conf/precision, with the arm's changes."""
    loaded = OmegaConf.load(MODELS.parent / "precision" / f"{arm.precision}.yaml")
    for key, value in (*arm.changes, ("backend", arm.backend)):
        OmegaConf.update(loaded, key, value)
    values = cast(dict[str, Any], OmegaConf.to_container(loaded, resolve=True))
    del values["defaults"]
    return cast(config.Precision, read(config.Precision, values, "precision"))


@dataclass(frozen=True)
class Case:
    """The case that all arms share: a step has `batch_size` sequences in one micro-batch.

    `recompute_mlp`: the number of blocks that compute their MLP's first product again, in the arms that do so.
    """

    model: config.Decoder
    batch_size: int
    sequence_length: int
    compile: bool
    device: str
    recompute_mlp: int = 0

    def settings(self, arm: Arm) -> config.Pretrain:
        train = config.Train(
            steps=10**6,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            compile=self.compile,
            activation_checkpointing="full" if arm.keeps == "input" else "none",
            recompute_mlp=self.recompute_mlp if arm.keeps == "less in MLPs" else 0,
        )
        return pretraining(self.model, arm.norm, precision_of(arm), train, lr=1e-5)


def build(case: Case, names: Sequence[str]) -> dict[str, TrainingRun]:
    """Return a run per arm. All share the same parameter and optimizer objects, so memory holds only one model."""
    device = resolve_device(case.device)
    own = OwnSettings() if case.compile else None
    configure_torch(case.compile)
    torch._dynamo.config.automatic_dynamic_shapes = False  # otherwise floats that differ between arms become dynamic
    torch._dynamo.config.recompile_limit = 8 * len(names)  # all arms share the same code objects
    runs: dict[str, TrainingRun] = {}
    for name in names:
        settings = case.settings(ALL_ARMS[name])
        with torch.device("meta"):
            model = build_model(settings)
        if runs:
            first = next(iter(runs.values()))
            model.load_state_dict(first.model.state_dict(keep_vars=True), assign=True)
            optimizer = first.optimizer
        else:
            model.to_empty(device=device).init_weights(settings.seed)
            optimizer = build_optimizer(model, settings.optimizer)
        set_precision(model, settings, 0, device)
        runs[name] = training_run(settings, model, optimizer, device)
        prepare(runs[name], ALL_ARMS[name], own)
    return runs


def prepare(run: TrainingRun, arm: Arm, own: OwnSettings | None) -> None:
    """Compile the arm's blocks and final norm. With Inductor's own settings, also do the first step here."""
    if arm.torchao:
        use_torchao(run.model)
    if arm.keeps == "products":
        for block in run.model.layers:
            recompute_between_products(block)
    has_own = arm.own_settings and own is not None
    parallelize(run.model, replace(run.config.train, compile=run.config.train.compile and not has_own))
    if own is not None and has_own:
        for module in (*run.model.layers, run.model.norm):
            own.compile(module)
        with own.on():
            train_step(run, 0)


def timed_steps(run: TrainingRun, steps: range) -> Timed:
    """Do these steps, which the host launches one behind the other, and return their time and memory."""

    def train() -> None:
        for step in steps:
            train_step(run, step)

    return timed(train, run.device)


def measure(runs: dict[str, TrainingRun], least_s: float) -> list[dict[str, Any]]:
    """Return a row per arm, from rounds that take `least_s` per arm, and at least three rounds."""
    with GpuLog(next(iter(runs.values())).device) as log:
        for step in range(WARMUP_ROUNDS):
            for name, run in runs.items():
                print(f"warm-up {step}: {name} {timed_steps(run, range(step, step + 1)).seconds:.3f} s", flush=True)
        rounds: list[list[Timed]] = []
        began_s = time.perf_counter()
        while len(rounds) < 3 or time.perf_counter() - began_s < least_s * len(runs):
            first = WARMUP_ROUNDS + STEPS_A_ROUND * len(rounds)
            rounds.append([timed_steps(run, range(first, first + STEPS_A_ROUND)) for run in runs.values()])
    of_arms = [list(own) for own in zip(*rounds, strict=True)]
    mxfp8 = of_arms[list(runs).index(MXFP8)] if MXFP8 in runs else None
    named = zip(runs.items(), of_arms, strict=True)
    rows = [row_of(name, run, own, of_arms[0], mxfp8) for (name, run), own in named]
    return [row | log.over([one.span for one in own]) for row, own in zip(rows, of_arms, strict=True)]


def row_of(
    name: str, run: TrainingRun, own: Sequence[Timed], first: Sequence[Timed], mxfp8: Sequence[Timed] | None
) -> dict[str, Any]:
    """Return an arm's row. `first` and `mxfp8` are the same rounds of the baseline and of the arm MXFP8."""
    seconds, first_s = (seconds_of_steps(rounds) for rounds in (own, first))
    peak_gib, first_gib = (max(one.peak_gib for one in rounds) for rounds in (own, first))
    step_s, spread_s = median_and_spread(seconds)
    ratio, ratio_spread = median_and_spread(seconds / first_s)
    over_mxfp8 = median_and_spread(seconds / seconds_of_steps(mxfp8)) if mxfp8 else (None, None)
    tokens_per_s = run.tokens_per_step / step_s
    flops = run.model.flops_per_token(run.config.train.sequence_length)
    return {
        "arm": name,
        "backend": all_backends(backends_of(run.model).values()),
        "step_ms": step_s * 1e3,
        "spread_ms": spread_s * 1e3,
        "over_bf16": ratio,
        "over_bf16_spread": ratio_spread,
        "over_mxfp8": over_mxfp8[0],
        "over_mxfp8_spread": over_mxfp8[1],
        "peak_gib": peak_gib or None,
        "peak_over_bf16": peak_gib / first_gib if first_gib else None,
        "tokens_per_s": tokens_per_s,
        "mfu": flops * tokens_per_s / run.peak_flops if run.peak_flops else None,
        "recompute_mlp": run.config.train.recompute_mlp,
        "recomputed": flops_again(run.config) / flops,
        "rounds": len(seconds),
    }


def seconds_of_steps(rounds: Sequence[Timed]) -> np.ndarray:
    """Return the seconds of a step of each round."""
    return np.array([one.seconds for one in rounds]) / STEPS_A_ROUND


def more_bytes(model: config.Decoder, tokens: int) -> int:
    """Return the bytes that a step in MXFP8 moves in addition to those of bf16 in the same kernels, outside of GEMMs.

    Per block and token: the heads' output is cast twice, with its own read and write each time; the gradients of both
    outputs are read once and written twice; those of both inputs, computed anyway, are written once more. The results
    that the backward recomputes are written in bf16 as well, and weights are read and written as often.
    """
    kv_size = model.num_kv_heads * model.hidden_size // model.num_heads
    inner = MLPS[model.mlp].parts * model.ffn_size
    thin, qkv = model.hidden_size, model.hidden_size + 2 * kv_size
    return model.num_layers * tokens * 2 * ((2 * 2 + 2 * 3) * thin + qkv + inner)


def case_of(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> Case:
    """Return the case that the options choose."""
    model = model_of(chosen.model)
    model = replace(model, ffn_size=chosen.ffn or model.ffn_size, vocab_size=chosen.vocabulary or model.vocab_size)
    recompute_mlp = chosen.recompute_mlp
    if recompute_mlp is None:
        recompute_mlp = math.ceil(model.num_layers * RECOMPUTED)
    elif not any(ALL_ARMS[name].keeps == "less in MLPs" for name in chosen.arms):
        parser.error("--recompute-mlp: give an arm that recomputes MLPs with --arms")
    elif recompute_mlp > model.num_layers:
        parser.error(f"--recompute-mlp: must be at most {model.num_layers}, the blocks of {chosen.model}")
    batch_size = chosen.batch or BATCH_SIZES.get(chosen.model, 8)
    return Case(model, batch_size, chosen.sequence, not chosen.eager, chosen.device, recompute_mlp)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("train_step", __doc__)
    parser.add_argument("--model", choices=LLAMAS, default="llama_125m", metavar="MODEL", help="a file of conf/model")
    parser.add_argument("--ffn", type=positive, help="default: the model file's")
    parser.add_argument("--vocabulary", type=positive, help="default: the model file's")
    parser.add_argument("--batch", type=positive, help="sequences per step")
    parser.add_argument("--sequence", type=positive, default=4096)
    parser.add_argument("--arms", nargs="+", choices=ALL_ARMS, default=list(ARMS), metavar="ARM", help=FIRST)
    what = "blocks that do; default: 7 of 16, in proportion"
    parser.add_argument("--recompute-mlp", type=positive, metavar="N", help=what)
    parser.add_argument("--seconds", type=float, default=10.0, help="time per arm")
    training_options(parser)
    parser.add_argument("--profile", action="store_true", help=PROFILED)
    chosen = parser.parse_args(arguments)
    case = case_of(parser, chosen)
    runs = build(case, list(dict.fromkeys([BASELINE, *chosen.arms])))
    rows = measure(runs, chosen.seconds)
    copied_per_s = bandwidth(runs[BASELINE].device, least_s=min(chosen.seconds, 1.0))
    tokens = case.batch_size * case.sequence_length
    floor = 1 + more_bytes(case.model, tokens) / copied_per_s / (rows[0]["step_ms"] / 1e3)
    print(f"floor of mxfp8 over bf16, from the extra bytes at {copied_per_s / 1e12:.3f} TB/s: {floor:.4f}")
    profiles = shown_profiles(runs, STEPS_A_ROUND) if chosen.profile else {}
    show([shown(row) for row in rows])
    sizes = {
        "baseline": BASELINE,
        "ffn": case.model.ffn_size,
        "vocabulary": case.model.vocab_size,
        "batch": case.batch_size,
        "sequence": chosen.sequence,
    }
    sizes |= {"copied_bytes_per_s": copied_per_s, "floor_over_bf16": floor}
    settings = {"model": chosen.model, **sizes, "compile": not chosen.eager}
    measured(rows, chosen.json, **settings, **profiles)


if __name__ == "__main__":
    main()
