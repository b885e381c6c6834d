"""Three products of TF32 are as near to float64 as one of FP32."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE

from mxstudy.numerics.kernels.linear_fp32 import run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("rows", "inner", "columns"), [(128, 96, 64), (64, 512, 192), (32, 32, 16), (24, 8, 8)])
def test_beside_float64(rows, inner, columns):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(rows, inner, generator=generator), torch.randn(columns, inner, generator=generator)
    exact = x.double() @ w.double().mT
    got = run(x.to(DEVICE), w.to(DEVICE)).cpu()
    assert (got - exact).abs().max() <= 2.0**-22 * inner**0.5 * exact.abs().max()
