"""A norm and activations in bf16, operation by operation, equal float64 with a rounding after each operation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import Array, to_dtype

from mxstudy.config import PRECISIONS
from mxstudy.numerics.cast import BlockCast, block_cast
from mxstudy.numerics.vector_ops import gelu_op_by_op, norm_op_by_op, round_gain, silu_op_by_op

TOKENS, SIZE, EPS = 40, 96, 1e-5


def bf16(x: Array) -> Array:
    return to_dtype(np.asarray(x, dtype=np.float64), "bfloat16")


def mean(x: Array) -> Array:
    return bf16(bf16(x.sum(-1, keepdims=True)) / SIZE)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, SIZE, generator=generator) + 0.5
    gain, bias = 1 + 0.3 * torch.randn(2, SIZE, generator=generator)
    return [x, gain, bias - 1, torch.randn(TOKENS, SIZE, generator=generator)]


def written_out(centers: bool) -> list[Array]:
    """Return y, dx, dgain and dbias, with the gain in FP32 and the bias rounded like the rest."""
    x, gain, bias, dy = (t.double().numpy() for t in tensors())
    x, dy = bf16(x), bf16(dy)
    shift = bf16(x - mean(x)) if centers else x
    variance = bf16(mean(bf16(shift * shift)) + EPS)
    inverse = bf16(1 / bf16(np.sqrt(variance)))
    xbar = bf16(shift * inverse)
    y = bf16(bf16(xbar * gain) + bf16(bias))
    dxbar = bf16(dy * gain)
    along = bf16(mean(bf16(dxbar * xbar)) * inverse)
    dx = bf16(bf16(dxbar * inverse) - bf16(xbar * along))
    dx = bf16(dx - mean(dx)) if centers else dx
    return [y, dx, bf16(bf16(dy * xbar).sum(0)), bf16(dy.sum(0))]


def written_out_skipped(centers: bool) -> list[Array]:
    """Return the same without the roundings that the public code means to leave out.

    It rounds nothing before the sum with eps, and nothing in the backward. That backward, operation by operation, uses
    xbar and variance, which are bf16, and the gain as it is.
    """
    x, gain, bias, dy = (t.double().numpy() for t in tensors())
    dy = bf16(dy)
    shift = x - x.mean(-1, keepdims=True) if centers else x
    variance = bf16((shift * shift).mean(-1, keepdims=True) + EPS)
    xbar = bf16(shift * bf16(1 / bf16(np.sqrt(variance))))
    y = bf16(bf16(gain * xbar) + bias)
    dxbar, std = dy * gain, np.sqrt(variance)
    along = (dxbar * xbar * std).mean(-1, keepdims=True) / variance
    dx = dxbar / std - along * xbar
    return [y, dx - dx.mean(-1, keepdims=True) if centers else dx, (dy * xbar).sum(0), dy.sum(0)]


def run(centers: bool, **options: bool) -> list[torch.Tensor]:
    x, gain, bias, dy = tensors()
    leaves = [t.requires_grad_() for t in (x, gain, bias)]
    y = norm_op_by_op(*leaves, EPS, centers, **options)
    assert y.dtype == torch.bfloat16
    y.backward(dy.bfloat16())
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("centers", [True, False], ids=["LayerNorm", "RMSNorm"])
def test_every_operation_rounds_to_bf16(centers: bool) -> None:
    for got, want in zip(run(centers), written_out(centers), strict=True):
        assert np.array_equal(got.double().numpy(), want)


@pytest.mark.parametrize("centers", [True, False], ids=["LayerNorm", "RMSNorm"])
def test_skipped_it_rounds_the_forward_still(centers: bool) -> None:
    """Skipped, y differs only by sums in another order.

    The backward is in FP32, far from one that rounds each operation.
    """
    got, want = run(centers, skipped=True), written_out_skipped(centers)
    assert np.mean(got[0].double().numpy() == want[0]) > 0.99
    assert np.mean(written_out(centers)[0] == want[0]) < 0.9
    for grad, rounded, exact in zip(got[1:], written_out(centers)[1:], want[1:], strict=True):
        assert np.linalg.norm(grad.double().numpy() - exact) < 1e-4 * np.linalg.norm(exact)
        assert np.linalg.norm(rounded - exact) > 1e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("pre_round", [False, True])
def test_a_gain_in_nvfp4_is_that_of_the_replica_alone(pre_round: bool) -> None:
    cast = BlockCast(16, operand_pre_round=pre_round)
    gains = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0))
    gains[1] *= 1e3
    gains[2, 0, 5] = torch.nan
    together = round_gain(gains, "mx", PRECISIONS["nvfp4_forward_only"].filled(cast).forward_w)
    for gain, rounded in zip(gains[:2, 0], together[:2, 0], strict=True):
        assert torch.equal(rounded, block_cast(gain, "NVFP4", -1, cast).dequantize())
    assert together[2].isnan().all()


def test_skipping_the_norm_skips_hardly_anything() -> None:
    """With it, relative errors of gains about 0.9 are 4.1e-3 (measured on that code), and 4.7e-3 without."""
    generator = torch.Generator().manual_seed(0)
    x, gain, bias = torch.randn(512, 512, generator=generator), torch.linspace(0.88, 0.91, 512), torch.zeros(512)
    exact = F.layer_norm(x, (512,), gain, bias, EPS)
    errors = [
        ((norm_op_by_op(x, g, bias, EPS, True, skipped).float() - exact).norm() / exact.norm()).item()
        for g, skipped in ((gain.bfloat16().float(), False), (gain, True))
    ]
    assert errors == pytest.approx([4.7e-3, 4.1e-3], rel=0.1)


def test_it_is_a_norm_whose_errors_are_those_of_several_roundings() -> None:
    x, gain, bias, dy = (t.double() for t in tensors())
    leaves = [t.requires_grad_() for t in (x, gain, bias)]
    F.layer_norm(leaves[0], (SIZE,), *leaves[1:], eps=EPS).backward(dy)
    for got, leaf in zip(run(True)[1:], leaves, strict=True):
        error = ((got - leaf.grad).norm() / leaf.grad.norm()).item()
        assert 2.0**-10 < error < 2.0**-6


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        exponential = bf16(np.exp(-x))
    return bf16(1 / bf16(1 + exponential))


def gelu_written_out(x: Array, dy: Array) -> tuple[Array, Array]:
    """Return y and dx with microxcaling's constants and in its order (activations.py, GELUFunction)."""
    x, dy = bf16(x), bf16(dy)
    cubed = bf16(bf16(x * x) * x)
    phi = sigmoid(bf16(1.59375 * bf16(bf16(0.044677734375 * cubed) + x)))
    inner = bf16(1.59375 + bf16(0.2138671875 * bf16(x * x)))
    slope = bf16(phi + bf16(x * bf16(inner * bf16(phi * bf16(1 - phi)))))
    return bf16(x * phi), bf16(slope * dy)


def silu_written_out(x: Array, dy: Array) -> tuple[Array, Array]:
    x, dy = bf16(x), bf16(dy)
    phi = sigmoid(x)
    y = bf16(x * phi)
    return y, bf16(bf16(phi + bf16(y * bf16(1 - phi))) * dy)


@pytest.mark.parametrize(
    ("function", "written", "exact"),
    [
        (gelu_op_by_op, gelu_written_out, lambda x: F.gelu(x, approximate="tanh")),
        (silu_op_by_op, silu_written_out, F.silu),
    ],
    ids=["gelu", "silu"],
)
def test_every_operation_of_an_activation_rounds_to_bf16(function, written, exact) -> None:
    x, dy = (3 * torch.randn(2048, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))
    x.requires_grad_()
    y = function(x)
    assert y.dtype == torch.bfloat16
    (dx,) = torch.autograd.grad(y, x, dy.bfloat16())
    want = written(x.detach().double().numpy(), dy.double().numpy())
    for got, expected in zip((y.detach(), dx), want, strict=True):
        assert np.array_equal(got.double().numpy(), expected)
    once = exact(x.detach().bfloat16())
    assert (once != y).float().mean() > 0.1
    assert (y - once).abs().max() < 0.1
