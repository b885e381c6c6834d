"""Compare the step of a mixture of experts with that of a plain loop and that of a dense model of its active size.

experts: all experts in one grouped GEMM in bf16, torch._grouped_mm or for fp8_tensor a kernel of ours, compiled block
by block. loop: one expert after the other, in eager mode, because the host waits for each. dense: the same depth,
width and tokens a step, with an MLP as large as the experts that a token is sent to, shared ones included, so that
its active parameters are those of the mixture without the router. The tokens are random, and so is the router: loads
are near balance, as training keeps them.

mfu_over_dense is the arm's MFU divided by that of the dense model in the same precision and the same run. --profile
adds the time of a step's kernels (kernels_ms) but for loops: where it is far below step_ms, the GPU waits for the host.

python -m benchmarks.experts [--model moe_200m] [--batch 16] [--profile] [--json PATH]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_log import shown
from benchmarks.kernel_times import shown_profiles
from benchmarks.report import measured, options_of, show, training_options
from benchmarks.train_step import MXNORM, PROFILED, RMSNORM, STEPS_A_ROUND, Arm, Case, measure
from benchmarks.training import MODELS, build, model_of
from mxstudy import config
from mxstudy.train.loop import TrainingRun
from mxstudy.train.runtime import configure_torch, resolve_device

MIXTURES = sorted(path.stem for path in MODELS.glob("*moe_*.yaml"))


class Contender(NamedTuple):
    """An arm: `is_dense` says whether its model is dense, and `partner` is the dense arm of its precision."""

    arm: Arm
    partner: str
    is_dense: bool = False
    is_loop: bool = False


CONTENDERS = {
    "experts, bf16": Contender(Arm(RMSNORM, "bf16"), "dense, bf16"),
    "experts, mxfp8": Contender(Arm(RMSNORM, "mxfp8"), "dense, mxfp8"),
    "experts, mxfp8, mxnorm_p2": Contender(Arm(MXNORM, "mxfp8"), "dense, mxfp8"),
    "experts, fp8_tensor": Contender(Arm(RMSNORM, "fp8_tensor"), "dense, fp8_tensor"),
    "loop, bf16": Contender(Arm(RMSNORM, "bf16", "reference"), "dense, bf16", is_loop=True),
    "loop, mxfp8": Contender(Arm(RMSNORM, "mxfp8", "reference"), "dense, mxfp8", is_loop=True),
    "loop, fp8_tensor": Contender(Arm(RMSNORM, "fp8_tensor", "reference"), "dense, fp8_tensor", is_loop=True),
    "dense, bf16": Contender(Arm(RMSNORM, "bf16"), "dense, bf16", is_dense=True),
    "dense, mxfp8": Contender(Arm(RMSNORM, "mxfp8"), "dense, mxfp8", is_dense=True),
    "dense, fp8_tensor": Contender(Arm(RMSNORM, "fp8_tensor"), "dense, fp8_tensor", is_dense=True),
}


def dense_of(model: config.Decoder) -> config.Decoder:
    """Return the dense model with the mixture's depth, width and active parameters."""
    ffn_size = (model.moe.top_k + model.moe.num_shared) * model.ffn_size
    return replace(model, mlp=model.moe.activation, moe=config.MoE(), ffn_size=ffn_size)


def build_contender(case: Case, contender: Contender) -> TrainingRun:
    model = dense_of(case.model) if contender.is_dense else case.model
    own = replace(case, model=model, compile=case.compile and not contender.is_loop)
    return build(own.settings(contender.arm), resolve_device(case.device))


def rows_of(runs: dict[str, TrainingRun], least_s: float) -> list[dict[str, Any]]:
    """Return a row per arm, with its parameters and its MFU as a share of the dense model's."""
    rows = {row["arm"]: row for row in measure(runs, least_s)}
    for name, row in rows.items():
        model, dense = runs[name].model, rows[CONTENDERS[name].partner]
        row["parameters"], row["active_matmul_parameters"] = model.num_params(), model.num_matmul_params()
        row["active_over_dense"] = model.num_matmul_params() / runs[dense["arm"]].model.num_matmul_params()
        sequence = runs[name].config.train.sequence_length
        flops = {arm: runs[arm].model.flops_per_token(sequence) for arm in (name, dense["arm"])}
        rate = row["tokens_per_s"] * flops[name]
        row["mfu_over_dense"] = rate / (dense["tokens_per_s"] * flops[dense["arm"]])
    return list(rows.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of("experts", __doc__)
    parser.add_argument("--model", choices=MIXTURES, default="moe_200m", metavar="MODEL", help="a file of conf/model")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=10.0, help="time per arm")
    training_options(parser)
    parser.add_argument("--profile", action="store_true", help=PROFILED)
    chosen = parser.parse_args(arguments)
    case = Case(model_of(chosen.model), chosen.batch, chosen.sequence, not chosen.eager, chosen.device)
    configure_torch(case.compile)
    torch._dynamo.config.recompile_limit = 8 * len(CONTENDERS)  # all arms share the same code objects
    torch._dynamo.config.automatic_dynamic_shapes = False  # otherwise sizes that differ between arms become dynamic
    runs = {name: build_contender(case, one) for name, one in CONTENDERS.items()}
    rows = rows_of(runs, chosen.seconds)
    profiled = {name: run for name, run in runs.items() if chosen.profile and not CONTENDERS[name].is_loop}
    profiles = shown_profiles(profiled, STEPS_A_ROUND) if profiled else {}
    kernels = profiles.get("kernels", {})
    for row in rows:
        row["kernels_ms"] = kernels[row["arm"]][-1]["ms"] if row["arm"] in kernels else None
    show([shown(row) for row in rows])
    sizes = {"model": chosen.model, "batch": chosen.batch, "sequence": chosen.sequence, "compile": not chosen.eager}
    measured(rows, chosen.json, **sizes, **profiles)


if __name__ == "__main__":
    main()
