"""The kernels of the benchmarks compute what they should."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE

from benchmarks.decode import run
from benchmarks.floor_kernel import copy_kernel
from mxstudy.numerics import FORMATS, quantize

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("fmt", ["E4M3", "E2M1", "NVFP4"])
def test_decode(fmt):
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-60, 60, 120 / 7)[:, None]
    x = x if FORMATS[fmt].scale == "E8M0" else x / x.abs().amax() * 2688
    x[1, :32] = 0
    one = None if FORMATS[fmt].scale == "E8M0" else 1.0
    quantized = quantize(x, fmt, tensor_scale=one)
    decoded = run(quantized.codes.to(DEVICE), quantized.scales.view(torch.uint8).to(DEVICE), fmt)
    assert torch.equal(decoded.cpu(), quantized.dequantize(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
def test_the_copy_writes_all_that_it_should(dtype):
    x = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int32, device=DEVICE)
    codes = torch.zeros(4096, dtype=dtype, device=DEVICE)
    scales = torch.full((256,), -1, dtype=torch.int8, device=DEVICE)
    copy_kernel[(4,)](x, codes, scales, BLOCKS=64, TILE=1024, num_warps=4)
    assert torch.equal(codes.cpu(), (x >> 16).to(dtype).cpu())
    assert torch.equal(scales.cpu(), torch.arange(64, dtype=torch.int8).repeat(4))
