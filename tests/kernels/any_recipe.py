"""What the tests of the kernel that casts by any recipe share."""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from fused import BF16, FP32, norm_inputs
from interpreter import DEVICE

from mxstudy.kernels.cast_any import absmax_any, cast_any, launch_absmax, launch_cuda
from mxstudy.kernels.operand_cast import KERNEL_ROUNDINGS
from mxstudy.kernels.packing import pack
from mxstudy.numerics.cast import quantize_as
from mxstudy.numerics.random_bits import Draws, stream_key

every_axis = pytest.mark.parametrize("axis", [-2, -1], ids=["columns", "rows"])
every_rounding = pytest.mark.parametrize("rounding", KERNEL_ROUNDINGS)
ALONE = {"scale": "E4M3", "chain": "training"}
BELOW_A_SCALE = ALONE | {"outer_scale": "tensor"}
FOUR_OVER_SIX = BELOW_A_SCALE | {"largest_scale": 256.0, "candidates": (1.0, 1.5)}
ONE = {"scale": "none", "outer_scale": "tensor"}  # for the whole tensor
DRAWS = Draws(torch.tensor(stream_key(3, "layer/dgrad_dh")), torch.tensor([5, 2**32 - 3]))


def kernel(x, cast, groups=None, **given):
    """Return the kernel's result as a CPU tensor, which must equal that of the operator away from GPUs."""
    of = dict.fromkeys(("mean", "rms", "gain", "bias", "signs")) | given
    key, place = DRAWS[:2] if cast.draws else (None, None)
    there = [None if t is None else t.to(DEVICE) for t in (*of.values(), key, place)]
    outer = launch_absmax(x.to(DEVICE), *there[:5], None, pack(cast)) if cast.has_outer else None
    absmax = absmax_any(x.contiguous(), cast, **given) if cast.has_outer else None
    if absmax is not None:
        assert_same_bits(outer.cpu(), absmax)
    got = launch_cuda(x.to(DEVICE), *there, outer, None, pack(cast), groups).cpu()
    assert_same_bits(got, cast_any(x.contiguous(), cast, **given, draws=DRAWS, outer=absmax))
    return got


def numbers(shape=(64, 64), dtype=FP32, seed=0):
    """Return numbers of many sizes, with a block of zeros and one of subnormals."""
    x, _, _ = norm_inputs(shape, dtype, seed)
    x[:16, :16] = 0
    x[16:32, :16] *= 2.0**-130
    return x


def quantized(x, cast):
    """Return x as the numerics quantise it, without the scale of the whole tensor."""
    found = quantize_as(x, cast.as_cast(), cast.axis, draws=DRAWS)
    return found.without_tensor_scale().dequantize(BF16)
