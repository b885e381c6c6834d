"""Compile `matmul_blocks` for a GPU of compute capability 9.0 that need not be there. See `ahead`."""

from __future__ import annotations

from typing import Any

from ahead import compile_ahead, print_all

from mxstudy.kernels.device.matmul_blocks import matmul_blocks_kernel

TYPES = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16") | dict.fromkeys(("a_scales_ptr", "b_scales_ptr"), "*fp32")
STRIDES = [f"{matrix}_{way}" for matrix in ("a", "b", "a_scales", "b_scales") for way in ("down", "along")]


def compiled(contiguous: list[str], height: int, width: int, warps: int) -> Any:
    """Return the compiled kernel. `contiguous` are the strides that are 1."""
    constants: dict[str, Any] = dict.fromkeys(contiguous, 1)
    constants |= {"scale_ptr": None, "INNER": 4096, "BLOCK": 128, "HEIGHT": height, "WIDTH": width}
    types = TYPES | dict.fromkeys(("rows", "columns", *STRIDES), "i32")
    sizes = [name for name in types if types[name] == "i32" and "scales" not in name]
    return compile_ahead(matmul_blocks_kernel, types, constants, warps, aligned=sizes)


if __name__ == "__main__":
    print_all(compiled)
