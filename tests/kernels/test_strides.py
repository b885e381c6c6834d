"""Operators take tensors with any strides, and return contiguous ones, as their fake tensors promise to a compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import assert_same_bits
from fused import BF16, DEVICE, FP32
from torch import Tensor, library

from mxstudy.kernels import RowNorm
from mxstudy.kernels.activation import ACTIVATIONS, Rounded
from mxstudy.kernels.norm_cast import Normed
from mxstudy.kernels.norm_codes import encoding
from mxstudy.kernels.operand_cast import OperandCast
from mxstudy.kernels.operators import UNREAD, checked_casts
from mxstudy.kernels.packing import pack
from mxstudy.numerics.cast import BlockCast

ROW = OperandCast("NVFP4", -1, 16, scale="E4M3", outer_scale="tensor", chain="training")
BLOCKS = OperandCast("E4M3", -1, 32, scale="FP32")
CASTS = checked_casts((64, 64), "E4M3", None, BlockCast())
ROUNDED = checked_casts((64, 64), None, None, BlockCast())
AGAIN = checked_casts((64, 64), UNREAD, "E4M3", BlockCast())
SWIGLU, RELU = (pack(Rounded(*ACTIVATIONS[name], True, True)) for name in ("swiglu", "relu"))
LAYER_NORM, MXNORM = pack(Normed(None, True, 1e-5, False)), pack(Normed(2.0, False, 1e-5, True))


def numbers(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


X, WIDE, RMS, GAIN = numbers(64, 64), numbers(64, 128), numbers(64, 1, dtype=FP32).abs(), numbers(64, dtype=FP32)
HEADS, ENDS = numbers(1, 64, 1, 32), torch.tensor([32, 64], dtype=torch.int32, device=DEVICE)
OF_EXPERTS = numbers(2, 64, 48, dtype=FP32 if DEVICE == "cpu" else BF16)
CALLS = {
    "cast_one, rounded": ("cast_one", X.float(), *(None,) * 5, False, -1, ROUNDED),
    "cast_one": ("cast_one", X, None, RMS, GAIN, None, None, True, -1, CASTS),
    "cast_both": ("cast_both", X, CASTS),
    "cast_any": ("cast_any", X, *(None,) * 9, OperandCast("E4M3").packed),
    "cast_any, rounded": ("cast_any", X.float(), *(None,) * 9, OperandCast(None).packed),
    "absmax_any": ("absmax_any", X, *(None,) * 6, ROW.packed),
    "cast_any_both": ("cast_any_both", X, GAIN.amax(), ROW.packed, replace(ROW, axis=-2).packed),
    "cast_blocks": ("cast_blocks", X, *(None,) * 8, BLOCKS.packed),
    "swiglu": ("activation_cast_both", WIDE, SWIGLU, CASTS),
    "relu": ("activation_cast_both", X, RELU, CASTS),
    "swiglu, backward": ("activation_backward_cast_both", X, WIDE, SWIGLU, CASTS, AGAIN),
    "relu, backward": ("activation_backward_cast_both", X, X + 1, RELU, CASTS, AGAIN),
    "norm": ("norm_cast_both", X, None, GAIN, None, LAYER_NORM, CASTS),
    "norm of a sum": ("norm_cast_both", X, X / 3, None, None, MXNORM, CASTS),
    "norm's backward": ("norm_backward_add", X, X + 1, RMS, RMS, GAIN, X / 3, 3),
    "codes": ("norm_codes", X, None, None, encoding(RowNorm(), "E4M3", BlockCast())),
    "codes of a sum": ("norm_codes", X, X / 3, 0.05, encoding(RowNorm(p=2.0), "NVFP4", BlockCast(16))),
    "heads": ("heads_cast_both", HEADS, HEADS[..., :16], HEADS[..., 16:], None, CASTS),
    "products": ("linear_gradients", X, X + 1, X, X / 3),
    "FP32": ("matmul_fp32", X.float(), X.float() + 1),
    "FP32 scales": ("matmul_blocks", WIDE, numbers(128, 64), RMS, None, None, 128),
    "experts": ("scaled_grouped_mm", X.to(OF_EXPERTS.dtype), OF_EXPERTS, None, None, ENDS),
}


def across(given: object) -> object:
    """Return a matrix with its columns one after another in memory, and anything else as it is."""
    return given.mT.contiguous().mT if isinstance(given, Tensor) and given.ndim > 1 else given


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_strides_of_arguments_are_not_those_of_results(call: tuple[object, ...]) -> None:
    name, first, *rest = call
    operator = getattr(torch.ops.mxstudy, str(name))
    for given in ((across(first), *map(across, rest)), (across(first), *rest), (first, *map(across, rest))):
        library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
        found, wanted = (
            one if isinstance(one, tuple) else (one,) for one in (operator(*given), operator(first, *rest))
        )
        assert all(one.is_contiguous() for one in found)
        if DEVICE == "cuda" and name != "linear_gradients":  # a reference on a CPU, and cuBLAS, may add up otherwise
            for one, other in zip(found, wanted, strict=True):
                assert_same_bits(one, other)
