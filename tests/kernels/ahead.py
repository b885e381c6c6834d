"""Compile `norm_codes` for a GPU of compute capability 9.0 that need not be there, with settings from stdin.

This runs in a process of its own, because the interpreter that other tests use replaces a kernel when it is defined. It
prints for each variant, as JSON, the registers and the bytes of stack of a thread, and the PTX.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mxstudy.kernels.device.norm_codes import norm_codes_kernel
from mxstudy.kernels.norm_cast import RowNorm
from mxstudy.kernels.norm_codes import known, row_tile
from mxstudy.numerics.cast import BlockCast

POINTERS = {"x_ptr": "*i32", "branch_ptr": "*i32", "total_ptr": "*i32", "codes_ptr": "*u8", "scales_ptr": "*u8"}


def compiled(columns: int, fmt: str, block_size: int, p: float | None, rounding: str, branch: bool, whole: bool) -> Any:
    tile = row_tile(columns, block_size)
    rows = 16 * tile.rows if whole else 16 * tile.rows + 1
    constants = known(tile, columns, rows, RowNorm(p), fmt, BlockCast(block_size, rounding=rounding))
    if not branch:
        constants |= {"branch_ptr": None, "total_ptr": None}
    types = POINTERS | {"rms_ptr": "*fp32", "rows": "i32", "tensor_scale": "fp32"}
    return compile_ahead(norm_codes_kernel, types, constants, tile.warps)


def compile_ahead(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, aligned: Sequence[str] = ()
) -> Any:
    """Return a kernel compiled for its arguments' types and for these constants.

    Pointers are aligned to 16 bytes, and the sizes named in `aligned` are multiples of 16.
    """
    names, types = kernel.arg_names, types | dict.fromkeys(constants, "constexpr")
    places = (i for i, name in enumerate(names) if types[name][0] == "*" or (types[name] == "i32" and name in aligned))
    divisible = {(i,): [["tt.divisibility", 16]] for i in places}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, {name: types[name] for name in names}, values, divisible)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "enable_fp_fusion": False}
    )


def resources(kernel: Any) -> dict[str, int]:
    """Return what Triton's disassembler says of a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        found = subprocess.run([tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True)
    return {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", found.stdout)}


def print_all(compile_one: Callable[..., Any]) -> None:
    kernels = [compile_one(*variant) for variant in json.load(sys.stdin)]
    print(json.dumps([resources(kernel) | {"ptx": kernel.asm["ptx"]} for kernel in kernels]))


if __name__ == "__main__":
    print_all(compiled)
