"""Run Triton kernels on tensors in CPU memory by Triton's interpreter, where there is no GPU but a Triton.

Import this before any kernel. The interpreter truncates what it converts to small floats, loses their subnormals, and
rounds a fused product twice. This module replaces that by what GPUs do: torch's saturating conversions, and one
rounding. It runs the PTX of kernels in NumPy, and reduces by whole arrays where kernels reduce by functions of their
own. The bounds of a loop may be numbers that a kernel has computed, which NumPy since 2.4 does not convert.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import ptx
import pytest
import torch
from each import each

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for scripts; tests have it from the conftest
triton = pytest.importorskip("triton", reason="kernels need Triton, which torch brings where it is built for GPUs")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def repair() -> None:
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

    small = {  # {Triton's type: torch's, the dtype of its bits, and the largest number if conversions saturate}
        tl.bfloat16: (torch.bfloat16, torch.uint16, torch.inf),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8, 448.0),
        tl.float8e5: (torch.float8_e5m2, torch.uint8, 57344.0),
    }
    otherwise, multiply = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    patch_tensor = interpreter._patch_lang_tensor

    def convert(self: Any, source: Any, to: Any) -> Any:
        before, after = source.dtype.scalar, to.scalar
        if before == tl.float32 and after in small:
            dtype, bits, largest = small[after]
            x = torch.from_numpy(np.ascontiguousarray(source.data)).clamp(-largest, largest)
            return TensorHandle(x.to(dtype).view(bits).numpy(), after)
        if before in small and after == tl.float32:
            dtype, bits, _ = small[before]
            x = torch.from_numpy(np.ascontiguousarray(source.data)).view(bits).view(dtype)
            return TensorHandle(x.to(torch.float32).numpy(), after)
        return otherwise(self, source, to)

    def multiply_add(self: Any, x: Any, y: Any, z: Any) -> Any:
        return TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        a, b = (convert(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, d, *options)

    def assembly(self: Any, text: str, constraints: str, operands: Any, types: Any, pure: bool, pack: int) -> Any:
        found = ptx.run(text, [operand.data for operand in operands], pack)
        handle = TensorHandle(found, {np.uint8: tl.uint8, np.float32: tl.float32}.get(found.dtype.type, tl.int32))
        return SimpleNamespace(get_result=lambda _: handle)

    def reduce(self: Any, inputs: Any) -> Any:
        def combined(x: Any, y: Any) -> Any:
            found = self.combine_fn.fn(*x, *y)
            return found if isinstance(found, tuple) else (found,)

        axis = 0 if self.axis is None else self.axis
        arrays = [x.handle.data.ravel() if self.axis is None else x.handle.data for x in inputs]
        moved = zip(*(np.moveaxis(array, axis, 0) for array in arrays), strict=True)
        slices = [tuple(self.to_tensor(y, x.dtype) for y, x in zip(one, inputs, strict=True)) for one in moved]
        found = [x.handle.data for x in functools.reduce(combined, slices)]
        shape = tuple(1 if i == axis or self.axis is None else n for i, n in enumerate(inputs[0].handle.data.shape))
        return [
            self.to_tensor(y.reshape(shape) if self.keep_dims else y, x.dtype)
            for y, x in zip(found, inputs, strict=True)
        ]

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    ReduceOps.generic_reduce = reduce
    InterpreterBuilder.create_inline_asm = assembly
    InterpreterBuilder.create_fp_ext = InterpreterBuilder.create_fp_trunc = convert
    InterpreterBuilder.create_fp_to_fp = lambda self, source, to, rounding: convert(self, source, to)
    InterpreterBuilder.create_fma = multiply_add
    InterpreterBuilder.create_dot = dot


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x * y + z of float32, rounded once: the float64 product is exact, and an inexact sum is made odd."""
    product, z = np.multiply(x, y, dtype=np.float64), z.astype(np.float64)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)
    bits = total.view(np.int64)
    off = np.isfinite(total) & (error != 0) & (bits % 2 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(off, bits + step, bits).view(np.float64).astype(np.float32)


if DEVICE == "cpu":
    repair()

from mxstudy.kernels.operators import KERNEL_FORMATS  # noqa: E402  # after the repair, as every kernel

every_format = each("fmt", KERNEL_FORMATS)
