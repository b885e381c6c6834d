"""Compiles `cross_entropy_` for a GPU of compute capability 9.0 that need not be there; see `ahead`."""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from ahead import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mxstudy.kernels.cross_entropy import TILE
from mxstudy.kernels.device.cross_entropy import cross_entropy_kernel


def compiled(columns: int, with_gradient: bool) -> Any:
    constants = {"COLUMNS": columns, "WIDTH": TILE.columns, "WITH_GRADIENT": with_gradient}
    types = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "nats_ptr": "*fp32", "scale": "fp32"}
    names = cross_entropy_kernel.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "").startswith("*")}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(cross_entropy_kernel, types | dict.fromkeys(constants, "constexpr"), values, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": TILE.warps, "enable_fp_fusion": False}
    )


if __name__ == "__main__":
    kernels = [compiled(*variant) for variant in json.load(sys.stdin)]
    print(json.dumps([resources(kernel) | {"ptx": kernel.asm["ptx"]} for kernel in kernels]))
