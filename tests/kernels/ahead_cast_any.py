"""Compile `cast_any` for a GPU of compute capability 9.0 that need not be there, without a norm. See `ahead`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ahead import compile_ahead, print_all

from mxstudy.kernels.cast_any_both import groups_of_both
from mxstudy.kernels.device.cast_any import absmax_any_kernel, cast_any_both_kernel, cast_any_kernel
from mxstudy.kernels.operand_cast import OperandCast, compiled_cast
from mxstudy.kernels.packing import unpack

COLUMNS = 4096
TYPES = {"x_ptr": "*bf16", "result_ptr": "*bf16", "rows": "i32"}
GIVEN = {"key_ptr": "*i64", "place_ptr": "*i64", "outer_ptr": "*fp32", "scales_ptr": "*fp32"}
UNUSED = ("mean_ptr", "rms_ptr", "gain_ptr", "bias_ptr", "signs_ptr")


def compiled(packed: str, what: str) -> Any:
    """Return the cast, or the kernel that finds its absmax, or the kernel of this cast and the same along columns."""
    cast = unpack(OperandCast, packed)
    settings = compiled_cast(cast, COLUMNS)
    if what == "both":
        casts = cast, replace(cast, axis=-2)
        row, column = (
            compiled_cast(c, COLUMNS, g) for c, g in zip(casts, groups_of_both(*casts, COLUMNS), strict=True)
        )
        types = dict.fromkeys(("x_ptr", "row_ptr", "column_ptr"), "*bf16") | {"outer_ptr": "*fp32", "rows": "i32"}
        return compile_ahead(cast_any_both_kernel, types, {"ROW": row, "COLUMN": column}, row.groups.warps)
    constant = dict.fromkeys(UNUSED) | {"CAST": settings}
    if what == "absmax":
        return compile_ahead(absmax_any_kernel, TYPES | {"result_ptr": "*i32"}, constant, settings.groups.warps)
    constant |= {} if cast.draws else dict.fromkeys(("key_ptr", "place_ptr"))
    constant |= {} if cast.has_outer else {"outer_ptr": None}
    constant |= {} if cast.scale == "FP32" else {"scales_ptr": None}
    return compile_ahead(cast_any_kernel, TYPES | GIVEN, constant, settings.groups.warps)


if __name__ == "__main__":
    print_all(compiled)
