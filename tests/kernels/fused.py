"""Compute by torch's own operations what comes before a cast in the operators of `numerics.kernels`, and its inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits

from mxstudy.kernels import RowNorm
from mxstudy.kernels.activation import ACTIVATIONS
from mxstudy.numerics.norm_linear import rms_coefficient

BF16, FP32 = torch.bfloat16, torch.float32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

every_dtype = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
every_activation = pytest.mark.parametrize("name", ACTIVATIONS)
every_rounding_of_values = pytest.mark.parametrize(
    ("gate", "dtype"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)], ids=["bf16", "code", "fp32"]
)
EXACT = ("relu", "relu2")
NORMS = {
    "RMSNorm": RowNorm(),
    "LayerNorm": RowNorm(centers=True),
    "MXNorm p1": RowNorm(p=1.0),
    "MXNorm p2": RowNorm(p=2.0),
    "MXNorm p0.7": RowNorm(p=0.7),
    "MXNorm p4": RowNorm(p=4.0),
}
every_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


def swiglu(h, gate_dtype, dtype):
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate.to(gate_dtype)).to(dtype) * up.to(dtype)


COMPOSED = {
    "relu": lambda h, gate, dtype: F.relu(h.to(dtype)),
    "relu2": lambda h, gate, dtype: F.relu(h.to(dtype)).square(),
    # They compute in FP32 first: without AVX-512, torch's GELU of bf16 on CPU differs from that of FP32, rounded.
    "gelu": lambda h, gate, dtype: F.gelu(h.float()).to(dtype),
    "gelu_tanh": lambda h, gate, dtype: F.gelu(h.float(), approximate="tanh").to(dtype),
    "swiglu": swiglu,
}


def activation_inputs(name, rows=64, columns=128, lead=()):
    """Return h and dz in bf16, with rows of different size."""
    generator = torch.Generator().manual_seed(0)
    spread = 2.0 ** torch.randint(-6, 4, (*lead, rows, 1), generator=generator)
    parts = 1 + ACTIVATIONS[name].gated
    h = torch.randn(*lead, rows, parts * columns, generator=generator) * spread
    return h.bfloat16(), torch.randn(*lead, rows, columns, generator=generator).bfloat16()


def assert_beside(actual, expected, name, inner):
    """Check equality but for a few neighbours in bf16 and the tail.

    `inner` says that an intermediate value was rounded too, which allows one more step.
    """
    if name in EXACT:
        assert_same_bits(actual, expected)
        return
    actual, expected = actual.float(), expected.float()
    assert (actual != expected)[expected.abs() > 1e-2].float().mean() < 2e-3
    assert torch.allclose(actual, expected, rtol=2.0 ** -(7 - inner), atol=5e-6)


def norm_inputs(shape=(64, 256), dtype=FP32, seed=0):
    """Return x, gain and bias, with rows of different size and mean."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2.0 ** torch.randint(-3, 4, (*shape[:-1], 1), generator=generator)
    x = torch.randn(shape, generator=generator) * rows + torch.randn(*shape[:-1], 1, generator=generator)
    gain = torch.randn(shape[-1], generator=generator)
    return x.to(dtype), gain, gain.flip(0) / 3


def rms_of(x, norm, block_size):
    """Return the mean, and the RMS or its estimate, float64 [..., 1]."""
    x = x.double()
    mean = x.mean(-1, keepdim=True) if norm.centers else torch.zeros(*x.shape[:-1], 1, dtype=torch.float64)
    if norm.p is None:
        return mean, ((x - mean).square().mean(-1, keepdim=True) + norm.eps).sqrt()
    maxima = x.unflatten(-1, (-1, block_size)).abs().amax(-1)
    estimate = maxima.pow(norm.p).mean(-1, keepdim=True).pow(1 / norm.p)
    return mean, rms_coefficient(norm.p, block_size) * estimate + norm.eps


def normalized(x, mean, rms, gain, bias):
    y = (x.float() - mean if mean.numel() else x.float()) / rms
    y = y if gain is None else y * gain.float()
    return y if bias is None else y + bias.float()
