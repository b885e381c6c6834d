"""Triton kernels on tensors in CPU memory, by Triton's interpreter, where there is no GPU but a Triton.

Imported before any kernel is. Of the interpreter's float32 -> bfloat16 and back, which truncates and loses subnormals,
this makes what GPUs do: torch's conversions.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton", reason="kernels need Triton, which torch brings where it is built for GPUs")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def repair_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    otherwise = InterpreterBuilder.cast_impl

    def convert(self: Any, source: Any, to: Any) -> Any:
        dtypes = (source.dtype.scalar, to.scalar)
        if dtypes == (tl.float32, tl.bfloat16):
            data = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.uint16).numpy()
        elif dtypes == (tl.bfloat16, tl.float32):
            data = (source.data.astype(np.uint32) << 16).view(np.float32)
        else:
            return otherwise(self, source, to)
        return TensorHandle(data, to.scalar)

    InterpreterBuilder.create_fp_ext = InterpreterBuilder.create_fp_trunc = convert


if DEVICE == "cpu":
    repair_bfloat16()
