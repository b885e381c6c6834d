"""Count the bytes that ranks gather of the blocks' weights, forward and backward, in bf16 and as MX codes.

Each case is a separate run of the training code under torchrun. Cases differ in `train.all_gather` alone. Tokens are
random, and nothing is saved. The bytes are those that FSDP2 hands to a block's collective, on all ranks together, with
codes, scales and norms: each of them has to reach every other rank. On CPU (gloo) the benchmark is a rehearsal that
counts the same bytes. With --deterministic the losses after all steps must have equal bits. Without it, a GPU's
attention sums its gradients in any order, and the times are those of training.

python -m benchmarks.all_gather [--model llama_1b] [--gpus 2] [--precision mxfp8] [--deterministic] [--json PATH]
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from benchmarks import scaling
from benchmarks.report import device_option, measured, show
from benchmarks.timing import median_and_spread
from benchmarks.training import build
from mxstudy import config
from mxstudy.compat.torch_fsdp import is_gathered_for_backward
from mxstudy.distributed import is_first, largest_over_ranks
from mxstudy.probes.stragglers import peak_gib
from mxstudy.studies.pretrain.check import check
from mxstudy.tracking.folder import RunFolder
from mxstudy.train.process_group import process_group
from mxstudy.train.runtime import configure_torch, resolve_device

ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before torch 2.13
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Case(scaling.Case):
    """One case of the benchmark."""

    all_gather: str = "compute"
    deterministic: bool = False

    def settings(self) -> config.Pretrain:
        settings = super().settings()
        return replace(settings, train=replace(settings.train, all_gather=cast(Any, self.all_gather)))


class Counted:
    """Counts the bytes that a block's all-gather hands on in each direction."""

    def __init__(self, block: FSDPModule) -> None:
        self.block, self.gathered = block, Counter[str]()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        direction = DIRECTIONS[is_gathered_for_backward(self.block)]
        self.gathered[direction] += output_tensor.nbytes
        return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


# ------------------------------------------------------------------------------------------------------ in each rank


def work(case: Case, path: Path) -> None:
    """Build the model, warm up and do the steps. The first rank writes the case's row to `path`."""
    device = resolve_device(case.device)
    configure_torch(case.compile, case.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    with process_group(device, RunFolder(path.parent)):
        check(case.settings(), case.gpus)
        torch.manual_seed(0)  # all cases see the same tokens
        run = build(case.settings(), device)
        blocks = [cast(FSDPModule, block) for block in run.model.layers]
        counted = [Counted(block) for block in blocks]
        for block, all_gather in zip(blocks, counted, strict=True):
            block.set_custom_all_gather(cast(Any, all_gather))
        steps = range(case.warmup_steps + case.steps)
        losses, seconds = zip(*(scaling.timed_step(run, step) for step in steps), strict=True)
        peak = largest_over_ranks({"peak_gib": peak_gib(device)})
        if is_first():
            gathered = sum((each.gathered for each in counted), Counter[str]())
            passes = case.batch_size // case.micro_batch_size * len(steps)
            row = row_of(case, np.array(seconds[case.warmup_steps :])) | peak | {"loss": losses[-1]}
            parameters = sum(weight.numel() for block in run.model.layers for weight in block.parameters())
            for direction in DIRECTIONS:
                row[f"{direction}_bytes"] = gathered[direction] // passes
                row[f"{direction}_bytes_a_parameter"] = gathered[direction] / passes / parameters
            path.write_text(json.dumps(row))


def row_of(case: Case, seconds: np.ndarray) -> dict[str, Any]:
    step_s, spread_s = median_and_spread(seconds)
    return asdict(case) | {"step_ms": step_s * 1e3, "spread_ms": spread_s * 1e3}


# ---------------------------------------------------------------------------------------- in the launching process


def main(arguments: Sequence[str] | None = None) -> None:
    parser = scaling.case_options("all_gather", __doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--precision", default="mxfp8", help="a recipe that quantises all weights")
    parser.add_argument("--deterministic", action="store_true", help="and compare the losses")
    device_option(parser)
    chosen = parser.parse_args(arguments)
    if chosen.work:
        work(Case(**json.loads(chosen.work[0])), Path(chosen.work[1]))
        return
    settings = scaling.settings_of(chosen, Case, compile=False, activation_checkpointing="none")
    cases = [Case(**settings, all_gather=all_gather) for all_gather in ("compute", "mx")]
    rows = [scaling.run_case(case, "benchmarks.all_gather") for case in cases]
    show(rows, without=settings)
    measured(rows, chosen.json, **settings)
    if chosen.deterministic and len({row["loss"] for row in rows}) > 1:
        sys.exit(f"losses differ: {[row['loss'] for row in rows]}")


if __name__ == "__main__":
    main()
