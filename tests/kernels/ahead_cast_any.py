"""Compiles `cast_any` for a GPU of compute capability 9.0 that need not be there, without a norm; see `ahead`."""

from __future__ import annotations

from typing import Any

from ahead import compile_ahead, print_all

from mxstudy.kernels.cast_any import OperandCast, compiled_cast
from mxstudy.kernels.device.cast_any import cast_any_kernel
from mxstudy.kernels.packing import unpack

COLUMNS = 4096
TYPES = {"x_ptr": "*bf16", "key_ptr": "*i64", "place_ptr": "*i64", "result_ptr": "*bf16", "rows": "i32"}
UNUSED = ("mean_ptr", "rms_ptr", "gain_ptr", "bias_ptr", "signs_ptr")


def compiled(packed: str) -> Any:
    cast = unpack(OperandCast, packed)
    settings = compiled_cast(cast, COLUMNS)
    unused = UNUSED if cast.draws else (*UNUSED, "key_ptr", "place_ptr")
    return compile_ahead(cast_any_kernel, TYPES, dict.fromkeys(unused) | {"CAST": settings}, settings.groups.warps)


if __name__ == "__main__":
    print_all(compiled)
