"""Compile `cross_entropy_` for a GPU of compute capability 9.0 that need not be there. See `ahead`."""

from __future__ import annotations

from typing import Any

from ahead import compile_ahead, print_all

from mxstudy.kernels.cross_entropy import TILE
from mxstudy.kernels.device.cross_entropy import cross_entropy_kernel

TYPES = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "nats_ptr": "*fp32", "scale": "fp32"}


def compiled(columns: int, with_gradient: bool) -> Any:
    constants = {"COLUMNS": columns, "WIDTH": TILE.columns, "WITH_GRADIENT": with_gradient}
    return compile_ahead(cross_entropy_kernel, TYPES, constants, TILE.warps)


if __name__ == "__main__":
    print_all(compiled)
