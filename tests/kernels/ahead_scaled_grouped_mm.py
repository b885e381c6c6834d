"""Compile `scaled_grouped_mm` for a GPU of compute capability 9.0 that need not be there. See `ahead`."""

from __future__ import annotations

from typing import Any

from ahead import compile_ahead, print_all

from mxstudy.kernels.device.scaled_grouped_mm import scaled_grouped_mm_kernel
from mxstudy.kernels.scaled_grouped_mm import DEPTH

POINTERS = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16") | dict.fromkeys(
    ("a_scales_ptr", "b_scales_ptr", "a_blocks_ptr", "b_blocks_ptr"), "*fp32"
)
SIZES = ["rows", "columns", "inner", "a_down", "a_along", "b_group", "b_down", "b_along"]
OF_SCALES = [f"{matrix}_scales_{way}" for matrix in ("a", "b") for way in ("group", "along")]
OF_BLOCKS = ["b_blocks_group", *(f"{matrix}_blocks_{way}" for matrix in ("a", "b") for way in ("down", "along"))]


def compiled(
    contiguous: list[str], by_rows: bool, groups: int, block_size: int, height: int, width: int, warps: int
) -> Any:
    """Return the compiled kernel. `contiguous` are the strides that are 1; a `block_size` of 0 is no blocks."""
    constants: dict[str, Any] = dict.fromkeys(contiguous, 1)
    constants |= {"BY_ROWS": by_rows, "BY_BLOCKS": block_size > 0, "IS_WHOLE": by_rows, "GROUPS": groups}
    constants |= {"HEIGHT": height, "WIDTH": width, "DEPTH": block_size or DEPTH}
    constants |= {} if block_size else {"a_blocks_ptr": None, "b_blocks_ptr": None}
    types = POINTERS | {"ends_ptr": "*i32"} | dict.fromkeys(("groups", *SIZES, *OF_SCALES, *OF_BLOCKS), "i32")
    return compile_ahead(scaled_grouped_mm_kernel, types, constants, warps, aligned=SIZES)


if __name__ == "__main__":
    print_all(compiled)
